#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bench/trace.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/prefix_chains.hpp"
#include "kvshard/result.hpp"

namespace kvshard::bench {

/// A prefix cache as an engine keeps one: a tree of blocks, each a chain of pages of one pool, shared by
/// the requests that begin alike. A block whose request runs, or that others follow, stays; of the rest
/// the one used longest ago goes when pages are short.
///
/// Threads: thread-compatible.
class PrefixCache {
 public:
  /// Requires page sizes that divide kBlockTokens.
  PrefixCache(const PageLayout& layout, PageAllocator allocator)
      : allocator_{std::move(allocator)},
        chains_{layout},
        block_pages_{kBlockTokens / layout.page_size()} {}

  /// A running request's pages, held until release().
  struct Request {
    std::vector<LogicalPage> pages;   ///< by position
    std::uint32_t cached_blocks{0};   ///< found here; pages behind them are new and to be written
    std::uint32_t last_block{kNone};  ///< deepest one in the tree
    std::uint32_t private_pages{0};   ///< the last so many are of a partial block, and not shared
  };
  /// Pages for a request, its whole blocks being in the cache from now on; nothing while running
  /// requests hold what it needs.
  /// Errors: resource_exhausted for a request that the empty pool cannot hold.
  Result<std::optional<Request>> admit(const TraceRequest& request);
  /// The request's pages are not read any more.
  Status release(const Request& request);
  /// Drops every block that no request holds.
  Status clear();

  [[nodiscard]] const PageAllocator& allocator() const { return allocator_; }
  [[nodiscard]] std::uint32_t block_pages() const { return block_pages_; }
  [[nodiscard]] std::size_t blocks() const { return chains_.size(); }
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }

 private:
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  struct Block {
    std::uint32_t id{0};
    std::uint32_t parent{kNone};
    std::uint32_t children{0};
    std::uint32_t holders{0};  // requests that end here
    std::uint64_t last_use{0};
    ChainId chain{};
    std::vector<LogicalPage> pages;
  };
  static std::uint64_t key(std::uint32_t parent, std::uint32_t id) {
    return (std::uint64_t{parent} << 32) | id;
  }
  void hold(std::uint32_t block);
  void let_go(std::uint32_t block);
  void note_idle(std::uint32_t block);
  Status evict_oldest();
  Result<std::uint32_t> insert(std::uint32_t parent, std::uint32_t id,
                               std::span<const LogicalPage> pages);

  PageAllocator allocator_;
  PrefixChains chains_;
  std::uint32_t block_pages_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> unused_;
  std::unordered_map<std::uint64_t, std::uint32_t> index_;         // by parent and id
  std::set<std::pair<std::uint64_t, std::uint32_t>> idle_leaves_;  // by last use
  std::uint64_t now_{0};
  std::uint64_t evicted_{0};
};

}  // namespace kvshard::bench
