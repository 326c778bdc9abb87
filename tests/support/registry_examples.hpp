#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <stop_token>
#include <string>

#include "kvshard/registry.hpp"

namespace kvshard::testing {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// Far above what anything here takes, also on a machine under load and under a sanitizer.
inline constexpr auto kRegistryLimit = 30s;

inline RankAnnouncement make_rank(std::uint32_t rank, std::uint32_t size, std::uint64_t epoch = 1) {
  return {.group = "models/llama",
          .epoch = epoch,
          .shard_rank = rank,
          .shard_size = size,
          .incarnation = 100 + rank,
          .host = "127.0.0.1",
          .port = static_cast<std::uint16_t>(5000 + rank),
          .geometry_fields = {{"kv.page_size", "64"}, {"model_id", "m"}}};
}

inline bool holds(const std::string& text, std::initializer_list<const char*> words) {
  return std::ranges::all_of(
      words, [&](const char* word) { return text.find(word) != std::string::npos; });
}

/// Asks until `condition` holds, which must not be long.
template <typename Condition>
bool eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kRegistryLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    ::poll(nullptr, 0, 5);
  }
  return true;
}

inline std::stop_token stopped_token() {
  static std::stop_source source;  // static: GCC 12 warns wrongly of a local one here
  source.request_stop();
  return source.get_token();
}

}  // namespace kvshard::testing
