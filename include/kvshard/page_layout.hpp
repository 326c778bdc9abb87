#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// Where a logical page lies.
struct Placement {
  std::uint32_t rank{0};  ///< shard rank of the owner
  LocalPage page{0};

  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Where a token slot lies.
struct TokenPlace {
  std::uint32_t rank{0};
  LocalPage page{0};
  std::uint32_t offset{0};  ///< tokens from the start of the page

  friend bool operator==(const TokenPlace&, const TokenPlace&) = default;
};

/// Exact division by one number, by multiplying with the inverse of its odd part modulo 2^32. The
/// product maps multiples of the number onto [0, max_quotient], and nothing else goes there.
/// Vectors have a multiplication and no division, so bulk loops use this; see
/// PageLayout::divisor().
struct ExactDivisor {
  std::uint32_t inverse{1};
  std::uint32_t shift{0};
  std::uint32_t max_quotient{0xffff'ffff};

  /// The quotient of a multiple; above max_quotient for any other number.
  [[nodiscard]] constexpr std::uint32_t quotient(std::uint32_t number) const noexcept {
    return std::rotr(number * inverse, static_cast<int>(shift));
  }
  [[nodiscard]] constexpr bool divides(std::uint32_t number) const noexcept {
    return quotient(number) <= max_quotient;
  }
};

/// Places the logical pages of a shard group on its ranks, and the positions of a chain on owners.
///
/// Page l belongs to rank l % shard_size, as local page l / shard_size there; no table is kept.
/// Whole pages go to ranks: a page is never striped. Position P of a chain with rotation base b
/// belongs to rank (b + P) % shard_size, so owners along a chain are cyclic.
///
/// Shapes:  logical pages are [0, shard_size * (pages_per_rank + 1)); the first shard_size are
/// padding. Units:   page_size in tokens. Owns:    nothing; a value, cheap to copy. Threads:
/// thread-compatible. Errors:  create() gives invalid_argument when shard_size or page_size is 0,
/// or when their product
///          exceeds 32 bits.
/// Cost:    all O(1) and allocation free, but check_cyclic(), which is vectorised.
/// Source:  docs/page_interleave.md.
class KVSHARD_EXPORT PageLayout {
 public:
  static Result<PageLayout> create(std::uint32_t shard_size, std::uint32_t page_size);

  [[nodiscard]] constexpr std::uint32_t shard_size() const noexcept { return shard_size_; }
  [[nodiscard]] constexpr std::uint32_t page_size() const noexcept { return page_size_; }
  /// Tokens in one page of every rank: shard_size * page_size.
  [[nodiscard]] constexpr std::uint32_t group_page_tokens() const noexcept {
    return shard_size_ * page_size_;
  }

  [[nodiscard]] constexpr Placement place(LogicalPage page) const noexcept {
    return {index(page) % shard_size_, LocalPage{index(page) / shard_size_}};
  }
  [[nodiscard]] constexpr std::uint32_t owner(LogicalPage page) const noexcept {
    return place(page).rank;
  }
  /// Inverse of place(). Requires rank < shard_size() and a result within 32 bits.
  [[nodiscard]] constexpr LogicalPage logical(std::uint32_t rank, LocalPage page) const noexcept {
    return LogicalPage{index(page) * shard_size_ + rank};
  }
  /// Local page 0 of some rank; never handed out.
  [[nodiscard]] constexpr bool is_padding(LogicalPage page) const noexcept {
    return index(page) < shard_size_;
  }

  /// slot = local page * (shard_size * page_size) + rank * page_size + offset, a bijection.
  [[nodiscard]] constexpr std::uint64_t token_slot(const TokenPlace& place) const noexcept {
    return (std::uint64_t{index(place.page)} * shard_size_ + place.rank) * page_size_ +
           place.offset;
  }
  /// Inverse of token_slot(). Requires a slot that some place has.
  [[nodiscard]] constexpr TokenPlace token_place(std::uint64_t slot) const noexcept {
    const auto at = place(LogicalPage{static_cast<std::uint32_t>(slot / page_size_)});
    return {at.rank, at.page, static_cast<std::uint32_t>(slot % page_size_)};
  }

  /// Pages that hold `tokens`, the last one perhaps in part.
  [[nodiscard]] constexpr std::uint64_t pages_for(std::uint64_t tokens) const noexcept {
    return tokens / page_size_ + (tokens % page_size_ != 0 ? 1 : 0);
  }
  /// Position of the page that a chain of `tokens` tokens is extended with.
  /// Errors: invalid_argument when the chain ends inside a page, since an extension starts
  /// page-aligned.
  [[nodiscard]] Result<Position> next_position(std::uint64_t tokens) const;

  /// Owner of the page that lies `pages` after one of rank `base`.
  [[nodiscard]] constexpr std::uint32_t owner_after(std::uint32_t base,
                                                    std::uint64_t pages) const noexcept {
    return static_cast<std::uint32_t>((base + pages % shard_size_) % shard_size_);
  }
  /// How many pages after one of rank `from` the next page of `to` lies: 0 when they are equal.
  /// Both are below shard_size().
  [[nodiscard]] constexpr std::uint32_t steps(std::uint32_t from, std::uint32_t to) const noexcept {
    return to >= from ? to - from : shard_size_ - from + to;
  }
  /// How many of `pages` consecutive pages of a chain belong to the owner of the one at `offset`,
  /// which is below shard_size(): pages / shard_size, give or take one.
  [[nodiscard]] constexpr std::uint64_t share(std::uint64_t pages,
                                              std::uint32_t offset = 0) const noexcept {
    return pages > offset ? (pages - offset - 1) / shard_size_ + 1 : 0;
  }

  /// Whether `pages` can be consecutive pages of a chain: owners are (owner[0] + k) % shard_size
  /// and none is padding. Always on. `first` is the position of pages[0], for the message. Errors:
  /// invalid_argument naming the first position that is wrong, its page, and why. Cost:   O(pages),
  /// several thousand million pages per second; allocates only the message.
  [[nodiscard]] Status check_cyclic(std::span<const LogicalPage> pages, Position first = {}) const;

  /// Divides by shard_size: for a page of rank r, quotient(page - r) is its local page.
  [[nodiscard]] constexpr const ExactDivisor& divisor() const noexcept { return divisor_; }

  friend constexpr bool operator==(const PageLayout& a, const PageLayout& b) noexcept {
    return a.shard_size_ == b.shard_size_ && a.page_size_ == b.page_size_;
  }

 private:
  PageLayout(std::uint32_t shard_size, std::uint32_t page_size) noexcept;

  std::uint32_t shard_size_;
  std::uint32_t page_size_;
  ExactDivisor divisor_;
};

/// The class-major order of a chain's positions: those with equal P % shard_size follow each other.
/// When decode gives its i-th destination page to position(i), what one shard sends lands on
/// consecutive pages instead of on every shard_size-th. Page tables make that free.
///
/// Shapes:  a bijection between i in [0, pages) and the positions [first, first + pages).
/// Owns:    nothing; a value.
/// Threads: thread-compatible.
/// Cost:    O(1), allocates nothing.
/// Source:  docs/page_interleave.md, "Destinations".
class ClassMajorOrder {
 public:
  /// `first` is the first position that decode lacks. Requires first + pages within 32 bits.
  constexpr ClassMajorOrder(const PageLayout& layout, Position first, std::uint32_t pages) noexcept
      : shard_size_{layout.shard_size()},
        first_{index(first)},
        short_{pages / shard_size_},
        longer_{pages % shard_size_} {}

  /// The position that the i-th destination page goes to.
  [[nodiscard]] constexpr Position position(std::uint32_t i) const noexcept {
    // The first `longer_` classes have one page more than the others.
    const auto split = longer_ * (short_ + 1);
    const auto cls = i < split ? i / (short_ + 1) : longer_ + (i - split) / short_;
    return Position{first_ + cls + (i - start(cls)) * shard_size_};
  }
  /// Inverse of position().
  [[nodiscard]] constexpr std::uint32_t destination(Position position) const noexcept {
    const auto k = index(position) - first_;
    return start(k % shard_size_) + k / shard_size_;
  }

 private:
  [[nodiscard]] constexpr std::uint32_t start(std::uint32_t cls) const noexcept {
    return cls * short_ + (cls < longer_ ? cls : longer_);
  }

  std::uint32_t shard_size_;
  std::uint32_t first_;
  std::uint32_t short_;   // pages of a short class
  std::uint32_t longer_;  // classes with one page more
};

}  // namespace kvshard
