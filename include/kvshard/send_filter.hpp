#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvshard/export.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// The part of a chunk that one rank sends.
///
/// Owns: nothing; `pages` lies in the memory that was given to select().
struct OwnedPages {
  std::span<const LocalPage> pages;  ///< in chunk order
  Run positions;          ///< pages[i] is at position first + i * stride; stride is shard_size
  std::uint32_t base{0};  ///< rotation base of the chain, the same for all its chunks

  [[nodiscard]] constexpr Position position(std::uint32_t i) const noexcept {
    return Position{positions.first + i * positions.stride};
  }
};

/// Says which pages of a chunk a prefill rank owns and sends.
///
/// Owners are read from the page ids, never from positions: a chain may start at any rank. Every id
/// of the chunk is checked, also those of other ranks, so a chunk that is not part of a chain is
/// refused on all ranks alike.
///
/// Owns:    nothing; a value.
/// Threads: thread-compatible.
/// Errors:  create() gives invalid_argument when shard_rank is not below shard_size; see select().
/// Cost:    O(pages), more than 10^9 ids per second; allocates only an error's message.
/// Source:  docs/page_interleave.md, "What a rank sends".
class KVSHARD_EXPORT SendFilter {
 public:
  static Result<SendFilter> create(const PageLayout& layout, std::uint32_t shard_rank);

  /// The owned local pages of `chunk`, whose pages are at positions first, first + 1, ..., written
  /// to the front of `out`. Owning none is a success, with an empty result. Errors:
  /// invalid_argument when owners are not cyclic or a page is padding (naming the position), when
  ///         positions exceed 32 bits, or when `out` holds fewer pages than the rank owns:
  ///         capacity() is always enough.
  Result<OwnedPages> select(std::span<const LogicalPage> chunk, Position first,
                            std::span<LocalPage> out) const;

  /// The most pages that this rank can own of a chunk of `pages`.
  [[nodiscard]] constexpr std::uint64_t capacity(std::uint64_t pages) const noexcept {
    return layout_.share(pages);
  }
  [[nodiscard]] constexpr const PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] constexpr std::uint32_t shard_rank() const noexcept { return shard_rank_; }

 private:
  SendFilter(const PageLayout& layout, std::uint32_t shard_rank) noexcept
      : layout_{layout}, shard_rank_{shard_rank} {}

  PageLayout layout_;
  std::uint32_t shard_rank_;
};

/// Compresses numbers to runs, greedily: each run takes as many as keep its step. Steps are
/// upwards; equal or descending neighbours start a new run, whose stride is 1 while it has one
/// number. Writes to the front of `out`, as many runs as it holds, and returns how many there are,
/// so that a result above out.size() says what was needed; `numbers.size()` runs are always enough.
/// Cost: O(numbers), allocates nothing.
KVSHARD_EXPORT std::size_t to_runs(std::span<const LocalPage> numbers, std::span<Run> out) noexcept;
KVSHARD_EXPORT std::size_t to_runs(std::span<const Position> numbers, std::span<Run> out) noexcept;

}  // namespace kvshard
