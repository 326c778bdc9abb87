#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/decode_rank.hpp"
#include "kvshard/export.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/transport.hpp"

namespace kvshard {

/// What a request's time on a rank consists of. Metrics have a histogram of each, traces a span.
enum class Stage : std::uint8_t {
  // Of a pull on the decode rank.
  queue,    ///< pull() to the progress thread
  connect,  ///< from there until the sessions that it needs are up
  wait,  ///< PULL to a source rank's first piece: prefill computes, or has no slot; one per source
  landing,  ///< a piece waits for a landing slot
  wire,     ///< a piece's fetch; on the mapped path its copy, which is all there is
  scatter,  ///< a piece's copy into pages
  commit,   ///< the last byte landed to the last verdict
  pull,     ///< all of it
  skew,     ///< the first source rank was done to the last one was; only of more than one
  // Of a lease, which is a pull as the prefill rank sees it.
  room,     ///< PULL waits for its room to be opened
  slot,     ///< a piece waits for a staging slot: others hold them, or the peer its share
  gather,   ///< a piece's copy into its slot, and what it waits for: the chunk's event
  exposed,  ///< READY to RELEASE: the peer waits for a landing slot, and fetches
  lease,    ///< from PULL, or the opening of its room, to COMMIT or another end
};
inline constexpr std::size_t kStages = 14;

/// The stage's name as spelled above.
KVSHARD_EXPORT std::string_view to_string(Stage stage) noexcept;

/// How many durations fell into each of a fixed set of classes, four to a doubling, from 1 us to 137 s.
///
/// Units:   nanoseconds.
/// Threads: thread-compatible; a plain copy.
struct DurationHistogram {
  static constexpr std::size_t kBuckets = 1 + 4 * 27;

  std::array<std::uint64_t, kBuckets> counts{};
  std::uint64_t sum_ns{0};

  /// The class of a duration: bucket 0 is below 1,024 ns, the last one has no upper end.
  [[nodiscard]] static constexpr std::size_t bucket(std::uint64_t ns) noexcept {
    if (ns < 1'024) return 0;
    const auto octave = static_cast<std::size_t>(std::bit_width(ns)) - 11;
    const std::size_t quarter = (ns >> (octave + 8)) & 3;
    const std::size_t index = 1 + 4 * octave + quarter;
    return index < kBuckets ? index : kBuckets - 1;
  }
  /// Where bucket `index` ends and the next one begins.
  [[nodiscard]] static constexpr std::uint64_t upper_bound_ns(std::size_t index) noexcept {
    const std::size_t octave = index / 4;
    return (4 + std::uint64_t{index % 4}) << (octave + 8);
  }
  [[nodiscard]] constexpr std::uint64_t count() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t each : counts) all += each;
    return all;
  }
  /// The duration that a share `q` of all lie below, within a quarter of itself; 0 of none.
  [[nodiscard]] KVSHARD_EXPORT std::chrono::nanoseconds quantile(double q) const noexcept;
};

using StageTimes = std::array<DurationHistogram, kStages>;
[[nodiscard]] inline const DurationHistogram& at(const StageTimes& times, Stage stage) noexcept {
  return times[static_cast<std::size_t>(stage)];
}

/// How operations ended: [0] well, the rest by the value of their ErrorCode.
using EndCounts = std::array<std::uint64_t, 10>;

/// By the value of TransferPath.
using PathCounts = std::array<std::uint64_t, 5>;

/// Handshakes that failed here because the two sides do not fit together, by the field that decided;
/// what else peers were refused for counts under the name of its ErrorCode.
struct RefusedCount {
  std::string field;
  std::uint64_t count{0};
};

/// One rank of a connected prefill group, as a decode rank sees it.
struct SourceMetrics {
  std::string group;
  std::uint64_t epoch{0};
  std::uint32_t shard_rank{0};
  bool connected{false};
  PathReport path;  ///< of the last session
  std::uint64_t pieces{0}, bytes{0};
  std::uint64_t slowest{0};  ///< pulls of several ranks that ended well and were done here last
  DurationHistogram wait, wire;
};

/// What a decode rank did since create(). See DecodeRank::metrics().
struct DecodeMetrics {
  DecodeStats stats;
  StageTimes stages{};
  EndCounts pulls{};
  std::uint64_t fragments{
      0};  ///< contiguous pieces of memory written; stats.pieces is what they travelled in
  PathCounts sessions{};           ///< made, by path
  PathCounts bytes{};              ///< landed, by path
  std::uint64_t not_mapped{0};     ///< sessions that were to be mapped, and are not
  std::uint64_t emulated{0};       ///< sessions on a transport that has no native get
  std::uint64_t landing_bytes{0};  ///< gauge: KV bytes in landing slots
  std::uint32_t landing_slots{0};
  std::vector<RefusedCount> refused;
  std::vector<SourceMetrics> sources;  ///< of connected groups
};

/// What a prefill rank did since create(). See PrefillRank::metrics().
struct PrefillMetrics {
  std::string group;
  std::uint32_t shard_rank{0}, shard_size{0};
  PrefillStats stats;
  StageTimes stages{};
  EndCounts pulls{};
  EndCounts rooms{};
  std::uint64_t fragments{
      0};  ///< contiguous pieces of memory read; stats.pieces_sent is what they travel in
  std::uint64_t peers_connected{0};          ///< gauge: past their handshake
  std::chrono::nanoseconds oldest_lease{0};  ///< gauge, as of the last sweep
  std::uint32_t slots{0};
  std::vector<RefusedCount> refused;
};

}  // namespace kvshard
