#include "layout/cyclic_scan.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kvshard/page_layout.hpp"

namespace kvshard {
namespace {

using Vector4 [[gnu::vector_size(16)]] = std::uint32_t;
using Vector8 [[gnu::vector_size(32)]] = std::uint32_t;
using Vector16 [[gnu::vector_size(64)]] = std::uint32_t;

// Page k follows page k - 1 when page[k] - 1 and page[k - 1] differ by a multiple of shard_size,
// either way round. The largest quotient and the lowest page tell all: no branch in the loop, and
// only operations that every vector unit has. The body is compiled once per target.
template <typename Vector>
[[gnu::always_inline]] inline bool scan(std::span<const LogicalPage> pages,
                                        const PageLayout& layout) noexcept {
  constexpr auto kLanes = sizeof(Vector) / sizeof(std::uint32_t);
  if (pages.empty()) return true;
  const auto divisor = layout.divisor();
  const auto shift_up = (32 - divisor.shift) % 32;
  std::uint32_t lowest = index(pages[0]);
  std::uint32_t highest_quotient = 0;
  const auto* const page = pages.data();
  const auto count = pages.size();
  std::size_t k = 1;
  if (count > kLanes) {
    Vector low{};
    low += lowest;
    Vector high{};
    for (;;) {
      Vector before;
      Vector here;
      std::memcpy(&before, page + k - 1, sizeof before);
      std::memcpy(&here, page + k, sizeof here);
      const Vector expected = here - 1;
      const Vector distance = expected > before ? expected - before : before - expected;
      const Vector product = distance * divisor.inverse;
      const Vector quotient = (product >> divisor.shift) | (product << shift_up);
      high = quotient > high ? quotient : high;
      low = here < low ? here : low;
      if (k + kLanes == count) break;
      k = std::min(k + kLanes, count - kLanes);  // the last step may look at some pages again
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lowest = std::min(lowest, low[lane]);
      highest_quotient = std::max(highest_quotient, high[lane]);
    }
  } else {
    for (; k < count; ++k) {
      const auto before = index(page[k - 1]);
      const auto expected = index(page[k]) - 1;
      const auto distance = expected > before ? expected - before : before - expected;
      highest_quotient = std::max(highest_quotient, divisor.quotient(distance));
      lowest = std::min(lowest, index(page[k]));
    }
  }
  return lowest >= layout.shard_size() && highest_quotient <= divisor.max_quotient;
}

bool scan_portable(std::span<const LogicalPage> pages, const PageLayout& layout) noexcept {
  return scan<Vector4>(pages, layout);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] bool scan_avx2(std::span<const LogicalPage> pages,
                                       const PageLayout& layout) noexcept {
  return scan<Vector8>(pages, layout);
}
[[gnu::target("avx512f")]] bool scan_avx512(std::span<const LogicalPage> pages,
                                            const PageLayout& layout) noexcept {
  return scan<Vector16>(pages, layout);
}
#endif

CyclicScan widest() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return scan_avx512;
  if (__builtin_cpu_supports("avx2")) return scan_avx2;
#endif
  return scan_portable;
}

}  // namespace

bool scan_cyclic(std::span<const LogicalPage> pages, const PageLayout& layout) noexcept {
  static const CyclicScan chosen = widest();
  return chosen(pages, layout);
}

std::vector<CyclicScan> cyclic_scans() {
  std::vector<CyclicScan> scans{scan_portable};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) scans.push_back(scan_avx2);
  if (__builtin_cpu_supports("avx512f")) scans.push_back(scan_avx512);
#endif
  return scans;
}

}  // namespace kvshard
