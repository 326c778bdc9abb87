#include "registry/rank_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/try.hpp"

namespace kvshard {
namespace {

std::size_t geometry_bytes(const RankAnnouncement& rank) {
  return std::accumulate(rank.geometry_fields.begin(), rank.geometry_fields.end(), std::size_t{0},
                         [](std::size_t sum, const auto& field) {
                           return sum + field.first.size() + field.second.size();
                         });
}

// "epoch 7 has 2 of 4 ranks, missing 1, 3"
std::string describe_gaps(std::uint64_t epoch,
                          const std::vector<const RankAnnouncement*>& present) {
  constexpr std::size_t kShown = 16;
  const std::uint32_t size = present.front()->shard_size;
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; rank < size; ++rank)
    if (std::ranges::none_of(present, [rank](const auto* p) { return p->shard_rank == rank; }))
      missing.push_back(rank);
  const auto shown = std::min(missing.size(), kShown);
  return fmt::format(
      "epoch {} has {} of {} ranks, missing {}{}", epoch, present.size(), size,
      fmt::join(missing.begin(), missing.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
      missing.size() > shown ? ", ..." : "");
}

}  // namespace

void RankTable::expire(TimePoint now) {
  std::erase_if(entries_,
                [&](const auto& item) { return now - item.second.heard >= time_to_live_; });
}

Status RankTable::announce(const RankAnnouncement& rank, TimePoint now) {
  KVSHARD_TRY(validate(rank));
  expire(now);
  std::size_t bytes = geometry_bytes(rank);
  for (const auto& [key, entry] : entries_) {
    bytes += geometry_bytes(entry.rank);
    const bool sibling = entry.rank.group == rank.group && entry.rank.epoch == rank.epoch &&
                         entry.rank.shard_rank != rank.shard_rank;
    if (sibling) KVSHARD_TRY(check_same_group(entry.rank, rank));
  }
  const auto key = key_of(rank);
  if (!entries_.contains(key) &&
      (entries_.size() >= kMaxListedRanks || bytes > kMaxListedGeometryBytes))
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("{} ranks are listed, {} are possible; geometry would take {} bytes of {}",
                    entries_.size(), kMaxListedRanks, bytes, kMaxListedGeometryBytes)};
  entries_[key] = Entry{rank, now};
  return {};
}

Status RankTable::renew(const RankAnnouncement& rank, TimePoint now) {
  expire(now);
  const auto found = entries_.find(key_of(rank));
  if (found != entries_.end() && found->second.rank.incarnation != rank.incarnation)
    return displaced(rank, found->second.rank.incarnation);
  return announce(rank, now);
}

void RankTable::withdraw(const RankAnnouncement& rank, TimePoint now) {
  expire(now);
  const auto found = entries_.find(key_of(rank));
  if (found != entries_.end() && found->second.rank.incarnation == rank.incarnation)
    entries_.erase(found);
}

std::vector<ListedRank> RankTable::list(std::string_view group, TimePoint now) {
  expire(now);
  std::vector<ListedRank> ranks;
  for (const auto& [key, entry] : entries_)
    if (group.empty() || entry.rank.group == group)
      ranks.push_back(
          {entry.rank, std::chrono::duration_cast<std::chrono::milliseconds>(now - entry.heard)});
  return ranks;
}

Result<GroupSpec> select_group(std::string_view group, const std::vector<RankAnnouncement>& ranks) {
  std::map<std::uint64_t, std::vector<const RankAnnouncement*>, std::greater<>>
      epochs;  // newest first
  for (const RankAnnouncement& rank : ranks) epochs[rank.epoch].push_back(&rank);
  Status contradiction;
  std::string gaps;
  for (const auto& [epoch, present] : epochs) {
    Status same;
    for (const RankAnnouncement* rank : present)
      if (same) same = check_same_group(*present.front(), *rank);
    if (!same) {
      if (contradiction) contradiction = same;
      continue;
    }
    if (present.size() == present.front()->shard_size) {
      GroupSpec spec{std::string{group}, epoch, {}};
      for (const RankAnnouncement* rank : present)
        spec.members.push_back({rank->shard_rank, rank->host, rank->port, rank->incarnation});
      std::ranges::sort(spec.members, {}, &GroupMember::shard_rank);
      return spec;
    }
    gaps += (gaps.empty() ? "" : "; ") + describe_gaps(epoch, present);
  }
  KVSHARD_TRY(std::move(contradiction));
  return Error{ErrorCode::unavailable, gaps.empty() ? "no rank is listed" : gaps};
}

}  // namespace kvshard
