#include "bench/prefix_cache.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/try.hpp"

namespace kvshard::bench {

// A leaf that is held is not idle; what others follow is no leaf. So holding a path's end holds the path.
void PrefixCache::hold(std::uint32_t block) {
  if (block == kNone) return;
  idle_leaves_.erase({blocks_[block].last_use, block});
  ++blocks_[block].holders;
}

void PrefixCache::let_go(std::uint32_t block) {
  if (block == kNone) return;
  --blocks_[block].holders;
  note_idle(block);
}

void PrefixCache::note_idle(std::uint32_t block) {
  if (block == kNone || blocks_[block].children > 0 || blocks_[block].holders > 0) return;
  idle_leaves_.emplace(blocks_[block].last_use, block);
}

Status PrefixCache::evict_oldest() {
  const std::uint32_t oldest = idle_leaves_.begin()->second;
  idle_leaves_.erase(idle_leaves_.begin());
  Block& block = blocks_[oldest];
  KVSHARD_TRY(chains_.remove(block.chain));
  KVSHARD_TRY(allocator_.free_chain(block.pages));
  index_.erase(key(block.parent, block.id));
  unused_.push_back(oldest);
  ++evicted_;
  if (block.parent != kNone) {
    --blocks_[block.parent].children;
    note_idle(block.parent);
  }
  return {};
}

Status PrefixCache::clear() {
  while (!idle_leaves_.empty()) KVSHARD_TRY(evict_oldest());
  return {};
}

Result<std::uint32_t> PrefixCache::insert(std::uint32_t parent, std::uint32_t id,
                                          std::span<const LogicalPage> pages) {
  Block block{.id = id,
              .parent = parent,
              .children = 0,
              .holders = 0,
              .last_use = now_,
              .chain = {},
              .pages = {pages.begin(), pages.end()}};
  if (parent == kNone) {
    KVSHARD_TRY(block.chain, chains_.add(pages));
  } else {
    KVSHARD_TRY(block.chain, chains_.join(blocks_[parent].chain, pages));
    idle_leaves_.erase({blocks_[parent].last_use, parent});
    ++blocks_[parent].children;
  }
  auto at = static_cast<std::uint32_t>(blocks_.size());
  if (unused_.empty()) {
    blocks_.push_back(std::move(block));
  } else {
    at = unused_.back();
    unused_.pop_back();
    blocks_[at] = std::move(block);
  }
  index_[key(parent, id)] = at;
  return at;
}

Result<std::optional<PrefixCache::Request>> PrefixCache::admit(const TraceRequest& request) {
  const PageLayout& layout = allocator_.layout();
  const std::uint64_t pages = layout.pages_for(request.input_tokens);
  if (allocator_.charge_pages(pages) > allocator_.total_pages())
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("a request of {} pages is charged {}, and the pool has {}", pages,
                             allocator_.charge_pages(pages), allocator_.total_pages())};
  const std::uint32_t whole_blocks = request.input_tokens / kBlockTokens;

  ++now_;
  Request made;
  std::uint32_t end = kNone;
  for (; made.cached_blocks < whole_blocks; ++made.cached_blocks) {
    const auto found = index_.find(key(end, request.blocks[made.cached_blocks]));
    if (found == index_.end()) break;
    end = found->second;
    made.pages.insert(made.pages.end(), blocks_[end].pages.begin(), blocks_[end].pages.end());
  }
  hold(end);
  const std::size_t cached_pages = made.pages.size();
  const std::uint64_t needed = pages - cached_pages;
  while (needed > 0 && allocator_.charge_pages(needed) > allocator_.admissible_pages()) {
    if (idle_leaves_.empty()) {
      let_go(end);
      return std::optional<Request>{};
    }
    KVSHARD_TRY(evict_oldest());
  }
  made.pages.resize(pages);
  const std::span<LogicalPage> fresh = std::span{made.pages}.subspan(cached_pages);
  if (end == kNone) {
    KVSHARD_TRY(allocator_.draw_chain(fresh));
  } else {
    KVSHARD_TRY(const std::uint32_t owner, chains_.next_owner(blocks_[end].chain));
    KVSHARD_TRY(allocator_.extend(owner, Position{0}, fresh));
  }
  const std::uint32_t found = end;
  for (std::uint32_t i = made.cached_blocks; i < whole_blocks; ++i) {
    KVSHARD_TRY(end,
                insert(end, request.blocks[i],
                       std::span{made.pages}.subspan(std::size_t{i} * block_pages_, block_pages_)));
  }
  hold(end);
  let_go(found);
  for (std::uint32_t at = end; at != kNone; at = blocks_[at].parent) blocks_[at].last_use = now_;
  made.last_block = end;
  made.private_pages = static_cast<std::uint32_t>(pages - whole_blocks * block_pages_);
  return std::optional{std::move(made)};
}

Status PrefixCache::release(const Request& request) {
  let_go(request.last_block);
  if (request.private_pages == 0) return {};
  return allocator_.free_chain(std::span{request.pages}.last(request.private_pages));
}

}  // namespace kvshard::bench
