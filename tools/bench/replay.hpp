#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "bench/report.hpp"
#include "bench/trace.hpp"
#include "kvshard/result.hpp"
#include "kvshard/transport.hpp"

namespace kvshard::bench {

/// A recorded trace through allocator, prefix cache and whole transfers, in one process.
///
/// The model is made small, so that what is measured is who holds which page: `layers` x K and V x one
/// head of `head_bytes`.
struct ReplayConfig {
  std::string trace;  ///< its name, for the report
  std::uint32_t shards{4};
  std::uint64_t pool_tokens{8U << 20};  ///< that the whole group can cache, whatever the shard size
  std::uint32_t page_size{64};          ///< divides kBlockTokens
  std::uint32_t in_flight{32};
  std::uint32_t layers{2};
  std::uint32_t head_bytes{8};
  std::uint64_t slot_bytes{256U << 10};
  std::uint32_t slots{32};
  TransportOptions::Kind transport{TransportOptions::Kind::loopback};
};

/// Replays the trace over `shards` prefill ranks, and over one that holds everything as each rank of an
/// unsharded group does; every byte of every request is compared as it arrives. A third run, of the cache
/// alone, gives the unsharded rank only as much memory as a sharded one has.
/// Errors: data_loss for a wrong byte; internal for a page, room, lease or slot left over at the end.
Result<Json> replay_trace(const ReplayConfig& config, std::span<const TraceRequest> requests);

std::string replay_verdict(const Json& replay);
/// Pool use of the fullest rank over requests, sharded and not.
std::string replay_svg(const Json& replay);

}  // namespace kvshard::bench
