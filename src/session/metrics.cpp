#include "kvshard/metrics.hpp"

#include <algorithm>
#include <cmath>

namespace kvshard {

std::string_view to_string(Stage stage) noexcept {
  static constexpr std::array<std::string_view, kStages> kNames{
      "queue", "connect", "wait", "landing", "wire",   "scatter", "commit",
      "pull",  "skew",    "room", "slot",    "gather", "exposed", "lease"};
  const auto index = static_cast<std::size_t>(stage);
  return index < kStages ? kNames[index] : "unknown";
}

// The middle of the bucket that holds it.
std::chrono::nanoseconds DurationHistogram::quantile(double q) const noexcept {
  const std::uint64_t all = count();
  if (all == 0) return {};
  const auto rank = static_cast<std::uint64_t>(std::ceil(q * static_cast<double>(all)));
  std::uint64_t below = 0;
  std::size_t index = 0;
  for (; index + 1 < kBuckets; ++index) {
    below += counts[index];
    if (below >= std::max<std::uint64_t>(rank, 1)) break;
  }
  const std::uint64_t begin = index == 0 ? 0 : upper_bound_ns(index - 1);
  return std::chrono::nanoseconds{
      static_cast<std::int64_t>(begin + (upper_bound_ns(index) - begin) / 2)};
}

}  // namespace kvshard
