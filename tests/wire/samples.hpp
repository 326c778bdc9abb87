#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "wire/codec.hpp"

// One or more messages of every type with each field at a value of its own, for the tests of the wire.
namespace kvshard::wire {

inline std::vector<std::byte> to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span{text});
  return {bytes.begin(), bytes.end()};
}

inline Geometry sample_geometry() {
  return {.model_id = "tiny",
          .groups = {{.name = "kv",
                      .layers = 3,
                      .buffers_per_layer = 2,
                      .element_type = ElementType::bf16,
                      .heads = 4,
                      .head_bytes = 0x20,
                      .order = PageOrder::token_major,
                      .page_size = 0x10,
                      .token_stride = 0x80,
                      .head_stride = 0x20,
                      .page_stride = 0x0900,
                      .page_count = 0x0101,
                      .parts = 4,
                      .part = 2,
                      .interleave = 8,
                      .first_head = 4,
                      .total_heads = 12,
                      .first_layer = 5,
                      .total_layers = 9},
                     {.name = "idx",
                      .layers = 3,
                      .buffers_per_layer = 1,
                      .element_type = ElementType::u8,
                      .heads = 1,
                      .head_bytes = 7,
                      .order = PageOrder::head_major,
                      .page_size = 0x10,
                      .page_count = 0x0101,
                      .table = 1}},
          .rank = 1,
          .ranks = 3};
}

inline Hello sample_hello() {
  return {.version_min = 1,
          .version_max = 2,
          .incarnation = 0x1122334455667788,
          .group = "g0",
          .epoch = 0x0a,
          .shard_rank = 2,
          .shard_size = 4,
          .transport = "ucx",
          .geometry = sample_geometry(),
          .landing_payload_bytes = 0x01000000,
          .heartbeat_ms = 1000};
}

inline Welcome sample_welcome() {
  return {.version = 1,
          .incarnation = 0x8877665544332211,
          .epoch = 0x0a,
          .shard_rank = 2,
          .shard_size = 4,
          .geometry = sample_geometry(),
          .transport_address = to_bytes("addr"),
          .staging = to_bytes("rk"),
          .pool = to_bytes("p"),
          .slot_count = 3,
          .slot_stride = 0x01000100,
          .heartbeat_ms = 1000};
}

inline Pull sample_pull() {
  return {.pull = 0x0102030405060708,
          .room = RoomId{0x1112131415161718},
          .window = 3,
          .wait_ms = 1500,
          .tables = {{.table = 0, .phase = 1, .first_token = 2, .end_token = 0x00010000},
                     {.table = 1, .phase = 0, .first_token = 0, .end_token = 1}}};
}

inline Ready sample_ready() {
  return {.pull = 0x0102030405060708,
          .lease = 9,
          .piece = 5,
          .slot = 1,
          .generation = 0x21,
          .payload_bytes = 0x4000,
          .first_buffer = 2,
          .buffer_count = 4,
          .base = 3,
          .first_unit = 0x0102030405,
          .unit_count = 17,
          .partial = false,
          .last = false,
          .checksum = true,
          .pages = {LocalPage{7}, LocalPage{0x0102}}};
}

inline Ready sample_last_ready() {
  return {.pull = 0x0102030405060708,
          .lease = 9,
          .piece = 6,
          .last = true,
          .tables = {{.table = 0, .base = 3, .end_token = 0x00010000}},
          .side_data = to_bytes("token")};
}

/// Consecutive bytes from `first` on.
inline std::array<std::byte, 32> sample_array(std::uint8_t first) {
  std::array<std::byte, 32> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(first + i);
  return bytes;
}

/// Calls `call` with the name and the message of each sample.
template <class Call>
void for_each_sample(Call call) {
  call("hello", sample_hello());
  call("welcome", sample_welcome());
  call("pull", sample_pull());
  call("ready", sample_ready());
  call("ready_last", sample_last_ready());
  call("release", Release{.pull = 7, .piece = 5, .slot = 1, .generation = 0x21});
  call("commit", Commit{.pull = 7, .pieces = 6, .digest = 0xfedcba9876543210});
  call("verdict_valid", Verdict{.pull = 7, .valid = true, .reason = {}});
  call("verdict_stale", Verdict{.pull = 7, .valid = false, .reason = "lease 9 expired"});
  call("abort", Abort{.pull = 7, .error = {ErrorCode::cancelled, "engine"}});
  call("ping", Ping{.sequence = 0x0102});
  call("bye", Bye{.error = {ErrorCode::unsupported, "no"}});
  call("authenticate",
       Authenticate{.version_min = 1, .version_max = 2, .nonce = sample_array(0x40)});
  call("challenge", Challenge{.version = 1, .nonce = sample_array(0x80)});
  call("proof", Proof{.mac = sample_array(0xc0)});
  call("assign",
       Assign{.lanes = {{.group = 1, .first_layer = 2, .layers = 3, .first_head = 4, .heads = 5}},
              .mapped = true});
}

/// Calls `call` with a value-initialised message of the type that `type` names.
template <class Call>
void with_message_of(MessageType type, Call call) {
  switch (type) {
    case MessageType::hello:
      return call(Hello{});
    case MessageType::welcome:
      return call(Welcome{});
    case MessageType::pull:
      return call(Pull{});
    case MessageType::ready:
      return call(Ready{});
    case MessageType::release:
      return call(Release{});
    case MessageType::commit:
      return call(Commit{});
    case MessageType::verdict:
      return call(Verdict{});
    case MessageType::abort:
      return call(Abort{});
    case MessageType::ping:
      return call(Ping{});
    case MessageType::bye:
      return call(Bye{});
    case MessageType::authenticate:
      return call(Authenticate{});
    case MessageType::challenge:
      return call(Challenge{});
    case MessageType::proof:
      return call(Proof{});
    case MessageType::assign:
      return call(Assign{});
  }
}

template <Message M>
std::vector<std::byte> frame_of(const M& message) {
  std::vector<std::byte> frame;
  encode(message, frame);
  return frame;
}

inline std::span<const std::byte> payload_of(std::span<const std::byte> frame) {
  return frame.subspan(kFrameHeaderBytes);
}

}  // namespace kvshard::wire
