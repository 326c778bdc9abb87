#pragma once

#include <cstdint>

#include "kvshard/export.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// What a pool must hold, and what one page of it costs.
struct FootprintRequest {
  std::uint64_t tokens{0};      ///< of all requests together
  std::uint64_t page_bytes{0};  ///< one page in all buffers of a rank: all layers, K and V
  std::uint64_t scratch_rows{
      0};  ///< tokens whose attention partials are merged across ranks at once
  std::uint64_t scratch_row_bytes{0};  ///< one token's partial
};

/// Bytes on one rank.
struct RankFootprint {
  std::uint64_t pages{0};  ///< physical pages, padding page 0 included
  std::uint64_t pool_bytes{0};
  std::uint64_t scratch_bytes{0};

  [[nodiscard]] constexpr std::uint64_t total_bytes() const noexcept {
    return pool_bytes + scratch_bytes;
  }
  friend bool operator==(const RankFootprint&, const RankFootprint&) = default;
};

struct Footprint {
  RankFootprint sharded;    ///< ceil(pages / shard_size) pages, and scratch of 2 * rows * row_bytes
  RankFootprint unsharded;  ///< every page on every rank, no scratch
};

/// What sharding saves on each rank, and what it costs, before it is turned on. A group of one rank
/// needs no scratch, so both are equal then.
/// Errors: invalid_argument when a size exceeds 64 bits.
KVSHARD_EXPORT Result<Footprint> footprint(const PageLayout& layout,
                                           const FootprintRequest& request);

}  // namespace kvshard
