#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// Names a chain of a PrefixChains; the caller keeps it in its tree node or hash entry. Never 0, and
/// not valid again after remove().
enum class ChainId : std::uint64_t {};

[[nodiscard]] constexpr std::uint64_t index(ChainId id) noexcept {
  return static_cast<std::uint64_t>(id);
}

/// Remembers on which rank each chain of a prefix cache starts, and refuses what would break the
/// rotation.
///
/// A cache keeps prefixes as nodes of a tree or as hashed blocks; each is a chain here: a rotation
/// base (the owner of its first page) and a number of pages. A path through the cache is one long
/// chain only if every node starts where the one before it stops; a node of another base cannot be
/// grafted onto it.
///
/// Shapes:  the pages themselves stay with the caller.
/// Owns:    one entry per chain.
/// Threads: thread-compatible.
/// Errors:  invalid_argument for a chain that is not there, pages that are not cyclic, and a split
///          outside the chain; failed_precondition for a refused graft. After an error nothing has
///          changed.
/// Cost:    O(1), and the check of the pages given; allocates only while more chains live than ever
///          before, or than reserve() was told.
/// Source:  docs/page_interleave.md, "Prefix chains".
class KVSHARD_EXPORT PrefixChains {
 public:
  explicit PrefixChains(const PageLayout& layout) noexcept : layout_{layout} {}

  void reserve(std::size_t chains);

  /// A chain that follows no other. Its base is read from its first page; `pages` is not empty.
  Result<ChainId> add(std::span<const LogicalPage> pages);
  /// A chain that follows `parent`. Refused whole when its first page is not of the rank that
  /// follows the parent's last: the caller keeps the pages private to their request, or frees them.
  Result<ChainId> join(ChainId parent, std::span<const LogicalPage> pages);
  /// Lengthens a chain at its end, by the same rule.
  Status append(ChainId chain, std::span<const LogicalPage> pages);
  /// Cuts a chain: it keeps its first `pages` pages, and the chain returned has the rest, with the
  /// base that it has there. What followed the whole chain now follows the rest.
  /// Requires 0 < pages < pages(chain).
  Result<ChainId> split(ChainId chain, std::uint64_t pages);
  Status remove(ChainId chain);

  /// Owner of the chain's first page.
  [[nodiscard]] Result<std::uint32_t> base(ChainId chain) const;
  /// Owner of the page that would follow the chain: the base for PageAllocator::extend() at
  /// position 0.
  [[nodiscard]] Result<std::uint32_t> next_owner(ChainId chain) const;
  [[nodiscard]] Result<std::uint64_t> pages(ChainId chain) const;
  /// Chains that live.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size() - unused_.size(); }

 private:
  struct Entry {
    std::uint32_t base{0};
    std::uint32_t generation{0};  // odd while the entry is in use, so that a stale id is found
    std::uint64_t pages{0};
  };

  Result<std::uint32_t> find(ChainId chain) const;
  Status check_follows(const Entry& entry, ChainId chain, std::span<const LogicalPage> pages) const;
  [[nodiscard]] std::uint32_t next_owner(const Entry& entry) const noexcept {
    return layout_.owner_after(entry.base, entry.pages);
  }
  ChainId insert(std::uint32_t base, std::uint64_t pages);

  PageLayout layout_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> unused_;
};

}  // namespace kvshard
