#include "kvshard/prefix_chains.hpp"

#include <fmt/format.h>

#include "base/try.hpp"

namespace kvshard {

void PrefixChains::reserve(std::size_t chains) {
  entries_.reserve(chains);
  unused_.reserve(chains);
}

Result<ChainId> PrefixChains::add(std::span<const LogicalPage> pages) {
  if (pages.empty()) return Error{ErrorCode::invalid_argument, "a chain without pages has no base"};
  KVSHARD_TRY(layout_.check_cyclic(pages));
  return insert(layout_.owner(pages[0]), pages.size());
}

Result<ChainId> PrefixChains::join(ChainId parent, std::span<const LogicalPage> pages) {
  if (pages.empty()) return Error{ErrorCode::invalid_argument, "a chain without pages has no base"};
  KVSHARD_TRY(const auto slot, find(parent));
  KVSHARD_TRY(check_follows(entries_[slot], parent, pages));
  return insert(layout_.owner(pages[0]), pages.size());
}

Status PrefixChains::append(ChainId chain, std::span<const LogicalPage> pages) {
  KVSHARD_TRY(const auto slot, find(chain));
  KVSHARD_TRY(check_follows(entries_[slot], chain, pages));
  entries_[slot].pages += pages.size();
  return {};
}

Result<ChainId> PrefixChains::split(ChainId chain, std::uint64_t pages) {
  KVSHARD_TRY(const auto slot, find(chain));
  auto& entry = entries_[slot];
  if (pages == 0 || pages >= entry.pages)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("a chain of {} pages cannot be split at {}", entry.pages, pages)};
  const auto rest = entry.pages - pages;
  entry.pages = pages;
  return insert(next_owner(entry), rest);
}

Status PrefixChains::remove(ChainId chain) {
  KVSHARD_TRY(const auto slot, find(chain));
  ++entries_[slot].generation;
  unused_.push_back(slot);
  return {};
}

Result<std::uint32_t> PrefixChains::base(ChainId chain) const {
  KVSHARD_TRY(const auto slot, find(chain));
  return entries_[slot].base;
}

Result<std::uint32_t> PrefixChains::next_owner(ChainId chain) const {
  KVSHARD_TRY(const auto slot, find(chain));
  return next_owner(entries_[slot]);
}

Result<std::uint64_t> PrefixChains::pages(ChainId chain) const {
  KVSHARD_TRY(const auto slot, find(chain));
  return entries_[slot].pages;
}

// Where the chain's entry is.
Result<std::uint32_t> PrefixChains::find(ChainId chain) const {
  const auto slot = static_cast<std::uint32_t>(index(chain));
  const auto generation = static_cast<std::uint32_t>(index(chain) >> 32);
  if (slot >= entries_.size() || entries_[slot].generation != generation || generation % 2 == 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("chain {:#x} is not there", index(chain))};
  return slot;
}

Status PrefixChains::check_follows(const Entry& entry, ChainId chain,
                                   std::span<const LogicalPage> pages) const {
  KVSHARD_TRY(layout_.check_cyclic(pages));
  if (pages.empty() || layout_.owner(pages[0]) == next_owner(entry)) return {};
  return Error{
      ErrorCode::failed_precondition,
      fmt::format("chain {:#x} of base {} and {} pages goes on at rank {}, page {} is of rank {}: "
                  "pages of another base cannot be joined",
                  index(chain), entry.base, entry.pages, next_owner(entry), index(pages[0]),
                  layout_.owner(pages[0]))};
}

ChainId PrefixChains::insert(std::uint32_t base, std::uint64_t pages) {
  auto slot = static_cast<std::uint32_t>(entries_.size());
  if (unused_.empty()) {
    entries_.emplace_back();
    unused_.reserve(entries_.capacity());  // so that remove() never allocates
  } else {
    slot = unused_.back();
    unused_.pop_back();
  }
  auto& entry = entries_[slot];
  ++entry.generation;
  entry.base = base;
  entry.pages = pages;
  return ChainId{std::uint64_t{entry.generation} << 32 | slot};
}

}  // namespace kvshard
