#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct CUevent_st;

namespace kvshard {

/// A page's number in the shard group's common page space, the same on every rank.
enum class LogicalPage : std::uint32_t {};
/// The owner's own number for a page. Every rank's local page 0 is padding.
enum class LocalPage : std::uint32_t {};
/// Index of a page within its request; pairs a source page with its destination.
enum class Position : std::uint32_t {};
/// The id that prefill and decode give one request; the engine chooses it, unique per group and epoch.
enum class RoomId : std::uint64_t {};

[[nodiscard]] constexpr std::uint32_t index(LogicalPage page) noexcept {
  return static_cast<std::uint32_t>(page);
}
[[nodiscard]] constexpr std::uint32_t index(LocalPage page) noexcept {
  return static_cast<std::uint32_t>(page);
}
[[nodiscard]] constexpr std::uint32_t index(Position position) noexcept {
  return static_cast<std::uint32_t>(position);
}
[[nodiscard]] constexpr std::uint64_t index(RoomId room) noexcept {
  return static_cast<std::uint64_t>(room);
}

/// A CUDA stream or event as it crosses the API; null where there is none.
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;

/// Where memory lies.
enum class MemoryKind : std::uint8_t { host = 1, cuda = 2 };

/// Numbers that ascend by a constant step: first, first + stride, ... (count of them).
///
/// The compact form of "which pages" or "which positions" on the wire and in the copy engines. Within a
/// chain, a shard's positions are one run of stride shard_size.
struct Run {
  std::uint32_t first{0};
  std::uint32_t stride{1};
  std::uint32_t count{0};

  friend bool operator==(const Run&, const Run&) = default;
};

}  // namespace kvshard
