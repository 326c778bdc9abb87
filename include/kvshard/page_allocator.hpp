#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// Which free page of an owner is drawn next.
enum class FreeOrder : std::uint8_t {
  last_freed_first = 0,  ///< the chain freed last, its pages in their old order: runs survive
  ascending = 1,         ///< the lowest free page: the pool stays compact, at a higher cost
};

/// Pages to draw for consecutive positions of one chain. A chain that is kept as several pieces (a
/// shared prefix and a private tail, say) is several segments.
struct DrawSegment {
  std::optional<std::uint32_t> base;  ///< rotation base of the chain; empty: a new one, chosen here
  Position first{0};                  ///< position of pages[0]; 0 for a new chain
  std::span<LogicalPage> pages;       ///< filled on success, untouched otherwise
};

/// Pages to free, from consecutive positions of one chain.
struct FreeSegment {
  std::uint32_t base{0};
  Position first{0};
  std::span<const LogicalPage> pages;  ///< borrowed until the call returns
};

/// Gives out the logical pages of a shard group, from one free list per owner.
///
/// Position P of a chain draws from owner (b + P) % shard_size; the base b of a new chain is the
/// owner with most free pages, the lowest such rank. A draw takes every page or changes nothing.
/// The state is a pure function of the calls since create(), so ranks that make the same calls hold
/// the same pages and equal snapshots, and no directory is needed.
///
/// Shapes:  each rank has pages_per_rank usable pages, local pages 1..pages_per_rank.
/// Owns:    the lists and, while a free group is open, a copy of its pages.
/// Threads: thread-compatible.
/// Errors:  a shortage is resource_exhausted and names the rank; misuse (double free, padding page,
/// page
///          out of range, page that was not drawn, owners not cyclic) is invalid_argument and names
///          the page. Misuse is always checked. After an error the state is as it was before the
///          call.
/// Cost:    a few ns per page; nothing is allocated after create(), but snapshots and errors'
/// messages.
///          About 9 bytes of memory per page; in ascending order a bit and a half.
/// Source:  docs/page_interleave.md, "Allocation".
class KVSHARD_EXPORT PageAllocator {
 public:
  /// Errors: invalid_argument when pages_per_rank is 0 or the pages exceed 32 bits.
  static Result<PageAllocator> create(const PageLayout& layout, std::uint32_t pages_per_rank,
                                      FreeOrder order = FreeOrder::last_freed_first);

  // ---- drawing

  /// Fills `pages` with a new chain and returns its base; with an empty span, the base one would
  /// get.
  Result<std::uint32_t> draw_chain(std::span<LogicalPage> pages);
  /// Fills `pages` with positions first, first + 1, ... of the chain with that base. It starts
  /// page-aligned by its type; PageLayout::next_position() gives it from tokens.
  Status extend(std::uint32_t base, Position first, std::span<LogicalPage> pages);
  /// Draws several segments, all or none. They are drawn in order: a new chain chooses its base
  /// after the segments before it were drawn.
  Status draw(std::span<const DrawSegment> segments);
  /// Fills pages[k] with a page of the same owner as like[k], a page of this or of another pool
  /// with equal layout: a host tier mirrors where device pages lie. `like` may be any list of
  /// pages, in any order. Errors: invalid_argument also when the sizes differ.
  Status draw_matching(std::span<const LogicalPage> like, std::span<LogicalPage> pages);

  // ---- freeing

  /// Frees consecutive pages of a chain; they can be drawn again at once.
  Status free_chain(std::span<const LogicalPage> pages);
  /// Frees several segments, of one or more chains, all or none; checks each against its base.
  Status free(std::span<const FreeSegment> segments);
  /// Holds back what is freed until end_free_group(): checked and copied by each call, drawable
  /// after the end. The group counts as one free, in the order of its calls. Groups do not nest.
  /// Errors: failed_precondition when a group is open, or (end) when none is.
  Status begin_free_group();
  Status end_free_group();

  // ---- admission and accounting

  /// What admission may promise: shard_size * min over ranks of free pages, never the sum, because
  /// a chain draws from every owner alike.
  [[nodiscard]] std::uint64_t admissible_pages() const noexcept;
  /// The same in tokens.
  [[nodiscard]] std::uint64_t admissible_tokens() const noexcept;
  /// What a request of `pages` pages is charged against admissible_pages(): one page more per rank,
  /// since a draw takes up to ceil(pages / shard_size) from each owner, wherever its base is.
  [[nodiscard]] constexpr std::uint64_t charge_pages(std::uint64_t pages) const noexcept {
    return pages + layout_.shard_size();
  }
  /// Whether a request of `pages` pages can be promised now. While the charges of all requests
  /// promised together fit, each of their draws succeeds. Errors: resource_exhausted naming the
  /// charge, what is admissible, and the rank that limits it.
  [[nodiscard]] Status admit(std::uint64_t pages) const;

  /// Free pages of one rank; 0 for a rank that is not there.
  [[nodiscard]] std::uint32_t free_pages(std::uint32_t rank) const noexcept;
  /// Free pages of all ranks together, for accounting and leak checks only: see admissible_pages().
  [[nodiscard]] std::uint64_t total_free_pages() const noexcept;
  /// Pages held back by an open free group.
  [[nodiscard]] std::uint64_t grouped_pages() const noexcept { return group_.size(); }
  /// Pages drawn and not freed; free, grouped and used pages add up to total_pages().
  [[nodiscard]] std::uint64_t used_pages() const noexcept;
  [[nodiscard]] std::uint64_t total_pages() const noexcept {
    return std::uint64_t{pages_per_rank_} * layout_.shard_size();
  }
  [[nodiscard]] const PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::uint32_t pages_per_rank() const noexcept { return pages_per_rank_; }
  [[nodiscard]] FreeOrder order() const noexcept { return order_; }

  // ---- replicas

  /// The whole state as bytes (little-endian): equal on ranks that made the same calls.
  [[nodiscard]] std::vector<std::byte> snapshot() const;
  /// Takes the state of a snapshot.
  /// Errors: failed_precondition when it is of another layout, size or order, naming both values;
  ///         invalid_argument when the bytes are not a snapshot, naming what is wrong.
  Status restore(std::span<const std::byte> snapshot);

 private:
  enum class PageState : std::uint8_t { free = 0, used = 1, grouped = 2 };

  PageAllocator(const PageLayout& layout, std::uint32_t pages_per_rank, FreeOrder order);

  Status check_draw(std::span<const DrawSegment> segments);
  Status check_segment(const FreeSegment& segment) const;
  Status refuse_page(LogicalPage page, std::uint64_t position) const;
  Status short_of(std::uint32_t rank, std::uint64_t needed) const;
  std::size_t mark(std::span<const LogicalPage> pages, PageState from, PageState to) noexcept;
  void take(std::uint32_t rank, std::uint64_t count, LogicalPage* to, std::size_t step) noexcept;
  void give(std::uint32_t rank, std::uint64_t count, const LogicalPage* from,
            std::size_t step) noexcept;

  PageLayout layout_;
  std::uint32_t pages_per_rank_;
  FreeOrder order_;
  bool group_open_{false};
  std::vector<std::uint32_t> free_;  // per rank: how many are free
  std::vector<PageState> state_;     // per logical page
  std::vector<std::uint32_t> left_;  // scratch of check_draw() and draw_matching()
  std::vector<LogicalPage> group_;   // pages of the open free group
  std::vector<LogicalPage>
      lists_;  // last_freed_first: per rank a stack; the next page is at its top
  std::vector<std::uint64_t>
      bits_;  // ascending: per rank, bit i says that local page i + 1 is free
  std::vector<std::uint64_t>
      filled_;  // ascending: per rank, bit w says that word w of bits_ is not 0
};

}  // namespace kvshard
