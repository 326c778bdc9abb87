#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/registry.hpp"

// The registry's bodies: JSON, from peers that are not trusted.
namespace kvshard {

/// A rank with how long ago it was last heard of.
struct ListedRank {
  RankAnnouncement rank;
  std::chrono::milliseconds age{0};
};

std::string encode_rank(const RankAnnouncement& rank);
/// A valid rank, or invalid_argument. Needs neither shard_rank nor shard_size: then a group of one.
Result<RankAnnouncement> decode_rank(std::string_view body);

std::string encode_ranks(const std::vector<ListedRank>& ranks);
/// Valid ranks that pass check_listing(). Errors: unavailable, as the registry is wrong.
Result<std::vector<RankAnnouncement>> decode_ranks(std::string_view body, std::string_view group);
/// All of `group`, no (epoch, shard rank) twice. Errors: unavailable, as the registry is wrong.
Status check_listing(const std::vector<RankAnnouncement>& ranks, std::string_view group);

std::string encode_time_to_live(std::chrono::milliseconds time_to_live);
Result<std::chrono::milliseconds> decode_time_to_live(std::string_view body);

std::string encode_error(const Error& error);
/// The error that a body holds; unavailable when it holds none.
Error decode_error(std::string_view body);

/// The first geometry field in which two ranks differ, or their shard sizes: failed_precondition
/// naming it and both values.
Status check_same_group(const RankAnnouncement& a, const RankAnnouncement& b);
/// What a rank is told whose place incarnation `by` has.
Error displaced(const RankAnnouncement& rank, std::uint64_t by);

/// Of a group, or of what `what` says. Errors: invalid_argument.
Status check_name(std::string_view what, std::string_view name);

}  // namespace kvshard
