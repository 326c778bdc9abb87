#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.hpp"
#include "kvshard/registry.hpp"
#include "registry/rank_json.hpp"

namespace kvshard {

/// Bounds on what a registry remembers.
inline constexpr std::size_t kMaxListedRanks = 16384;
inline constexpr std::size_t kMaxListedGeometryBytes = 64U << 20;

/// The ranks that a registry knows, each until it is not heard of for the time to live.
///
/// Threads: thread-compatible. Time is what the caller says.
class RankTable {
 public:
  explicit RankTable(Duration time_to_live) noexcept : time_to_live_{time_to_live} {}

  /// Errors: invalid_argument; failed_precondition when the rank does not fit its group;
  /// resource_exhausted.
  Status announce(const RankAnnouncement& rank, TimePoint now);
  /// As announce(), but does not displace another incarnation: failed_precondition.
  Status renew(const RankAnnouncement& rank, TimePoint now);
  void withdraw(const RankAnnouncement& rank, TimePoint now);
  /// Of one group, or of all with an empty name; by group, epoch, rank.
  [[nodiscard]] std::vector<ListedRank> list(std::string_view group, TimePoint now);

 private:
  using Key = std::tuple<std::string, std::uint64_t, std::uint32_t>;
  struct Entry {
    RankAnnouncement rank;
    TimePoint heard;
  };

  static Key key_of(const RankAnnouncement& rank) {
    return {rank.group, rank.epoch, rank.shard_rank};
  }
  void expire(TimePoint now);

  Duration time_to_live_;
  std::map<Key, Entry> entries_;
};

/// The newest whole epoch among `ranks` (of one group). Errors: failed_precondition when ranks of
/// an epoch contradict each other and no epoch is whole; unavailable saying which ranks are
/// missing.
Result<GroupSpec> select_group(std::string_view group, const std::vector<RankAnnouncement>& ranks);

}  // namespace kvshard
