#pragma once

#include <cstdint>
#include <string>

#include "bench/ucx_baseline.hpp"
#include "support/channel.hpp"

namespace kvshard::bench {

using tools::Channel;
using tools::Json;

/// The processes of a pull measure, each told what to do over a channel by the program that started it.
/// The first message has "config" (a PullConfig) and "rank". Each answers every message once; an answer
/// with "failed" is the last. Both return a process's exit code.
///
/// "trace" in the first message names the file that the rank's trace goes to in the end; empty: none.
///
/// A prefill rank. First: "pullers", "decode_ranks" -> "port", "remotes" (one for each decode rank)
///   {"op": "publish", "first_room"}  opens and publishes a room for each request
///   {"op": "baseline"}               serves bare UCX until the next message
int run_prefill(Channel& channel);

/// A decode rank. First: "members", "remotes" (of the prefill ranks) -> "paths"
///   {"op": "pull", "first_room"}  all requests at once -> "begin_ns", "end_ns", "bytes", "pulls"
///   {"op": "check"}               -> "wrong": what is, or nothing
///   {"op": "memcpy" | "bare" | "pages"}  a baseline -> "begin_ns", "end_ns", "bytes", "operations"
int run_decode(Channel& channel);

/// Tells the parent why this process cannot go on, and gives its exit code.
inline int give_up(Channel& channel, const Error& error) {
  (void)channel.send({{"failed", error.message}});
  return 1;
}

/// Bytes as CBOR has them.
inline Json to_binary(std::span<const std::byte> bytes) {
  const auto* const from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return Json::binary({from, from + bytes.size()});
}
inline std::vector<std::byte> from_binary(const Json& json) {
  const auto& binary = json.get_binary();
  const auto* const from = reinterpret_cast<const std::byte*>(binary.data());
  return {from, from + binary.size()};
}

inline Json to_json(const UcxBaseline::Remote& remote) {
  return {{"address", to_binary(remote.address)},
          {"slots_key", to_binary(remote.slots.key)},
          {"slots_at", remote.slots.at},
          {"pool_key", to_binary(remote.pool.key)},
          {"pool_at", remote.pool.at}};
}
inline UcxBaseline::Remote remote_from(const Json& json) {
  return {.address = from_binary(json["address"]),
          .slots = {from_binary(json["slots_key"]), json["slots_at"].get<std::uint64_t>()},
          .pool = {from_binary(json["pool_key"]), json["pool_at"].get<std::uint64_t>()}};
}

}  // namespace kvshard::bench
