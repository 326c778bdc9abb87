#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"
#include "tiny_llm/config.hpp"
#include "tiny_llm/peers.hpp"

namespace tiny_llm {

/// One request's KV rows, as the model sees them: the only way in which it touches its cache.
///
/// Shapes:  a row is KvShape::row_floats() floats; buffers as in KvShape.
/// Threads: thread-compatible. One request is computed by one thread at a time.
class KvCache {
 public:
  virtual ~KvCache() = default;
  KvCache() = default;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  KvCache(KvCache&&) = default;
  KvCache& operator=(KvCache&&) = default;

  [[nodiscard]] virtual const KvShape& shape() const noexcept = 0;
  /// Positions are [0, capacity_tokens()).
  [[nodiscard]] virtual std::size_t capacity_tokens() const noexcept = 0;
  /// Whether the token at `position` is run here; if not, a peer runs it, and exchange() brings its rows.
  [[nodiscard]] virtual bool runs(std::size_t /*position*/) const noexcept { return true; }
  virtual void store(std::size_t buffer, std::size_t position, std::span<const float> row) = 0;
  /// Called once the rows of [first, end) that are computed here were stored; afterwards all can be loaded.
  virtual kvshard::Status exchange(std::size_t /*buffer*/, std::size_t /*first*/,
                                   std::size_t /*end*/) {
    return {};
  }
  /// The row of `position`, and those of the positions after it that lie right behind it. Borrowed
  /// until the cache is destroyed.
  [[nodiscard]] virtual std::span<const float> load(std::size_t buffer,
                                                    std::size_t position) const = 0;
};

/// A pool of such rows as kvshard wants it described: one group "kv" of f32, token-major, packed pages.
[[nodiscard]] kvshard::Geometry kv_geometry(const KvShape& shape, std::uint32_t page_size,
                                            std::uint32_t page_count, std::string model_id);

/// The pages of one rank: a buffer of [page][token][row] floats for each layer's keys, values or latents.
///
/// Page 0 is padding and belongs to no request. Fresh pages hold NaN, so a row that was never stored, or
/// never arrived, spoils every logit that depends on it.
///
/// Units:   page_size in tokens.
/// Owns:    the buffers, which stay where they are when the pool is moved.
/// Threads: requests may use their own pages from different threads.
/// Errors:  create() gives invalid_argument when a size is 0 or the pool is beyond 64 GiB.
class KvPool {
 public:
  static kvshard::Result<KvPool> create(const KvShape& shape, std::uint32_t page_size,
                                        std::uint32_t page_count);
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;
  KvPool(KvPool&&) = default;
  KvPool& operator=(KvPool&&) = default;

  [[nodiscard]] const KvShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint32_t page_size() const noexcept { return page_size_; }
  [[nodiscard]] std::uint32_t page_count() const noexcept { return page_count_; }
  [[nodiscard]] std::size_t page_floats() const noexcept {
    return std::size_t{page_size_} * shape_.row_floats();
  }

  /// One page of one buffer, row after row.
  [[nodiscard]] std::span<float> page(std::size_t buffer, kvshard::LocalPage page) noexcept;
  [[nodiscard]] std::span<const float> page(std::size_t buffer,
                                            kvshard::LocalPage page) const noexcept;

  /// Its kv_geometry(), and where its buffers start.
  [[nodiscard]] kvshard::Pool describe(std::string model_id);

 private:
  KvPool(const KvShape& shape, std::uint32_t page_size, std::uint32_t page_count);

  KvShape shape_;
  std::uint32_t page_size_;
  std::uint32_t page_count_;
  std::vector<std::vector<float>> buffers_;
};

/// A cache without pages: what paged ones are compared with, and the scratch of a sharded prefill rank.
class ContiguousKv final : public KvCache {
 public:
  ContiguousKv(const KvShape& shape, std::size_t capacity_tokens);

  [[nodiscard]] const KvShape& shape() const noexcept override { return shape_; }
  [[nodiscard]] std::size_t capacity_tokens() const noexcept override { return capacity_tokens_; }
  void store(std::size_t buffer, std::size_t position, std::span<const float> row) override;
  [[nodiscard]] std::span<const float> load(std::size_t buffer,
                                            std::size_t position) const override;

 private:
  KvShape shape_;
  std::size_t capacity_tokens_;
  std::vector<std::vector<float>> buffers_;
};

/// A request in a pool that holds all of its pages: unsplit serving, and a decode rank.
///
/// Owns:    its page table; not the pool, which must outlive it.
/// Errors:  create() gives invalid_argument for a page that is padding or beyond the pool.
class PagedKv final : public KvCache {
 public:
  /// pages[i] holds the request's tokens [i * page_size, (i + 1) * page_size).
  static kvshard::Result<PagedKv> create(KvPool& pool, std::vector<kvshard::LocalPage> pages);

  [[nodiscard]] const KvShape& shape() const noexcept override { return pool_->shape(); }
  [[nodiscard]] std::size_t capacity_tokens() const noexcept override;
  void store(std::size_t buffer, std::size_t position, std::span<const float> row) override;
  [[nodiscard]] std::span<const float> load(std::size_t buffer,
                                            std::size_t position) const override;

 private:
  PagedKv(KvPool& pool, std::vector<kvshard::LocalPage> pages)
      : pool_{&pool}, pages_{std::move(pages)} {}

  KvPool* pool_;
  std::vector<kvshard::LocalPage> pages_;
};

/// A request on one of the prefill ranks that share its pages and its work.
///
/// The rank that owns a page (kvshard::PageLayout) runs the tokens on it, and stores their rows there. Attention
/// needs the rows of all tokens, so those of peers are gathered, buffer by buffer, into a scratch that lives
/// as long as the prefill.
///
/// Owns:    its page table and the scratch; not the pool and the peers, which must outlive it.
/// Errors:  create() gives invalid_argument when peers or pool do not fit the layout, and for a page that is
///          padding or beyond the pool. exchange() gives what Peers::all_gather() gives, and internal when
///          the peers' rows are not those that were missing.
class ShardedPrefillKv final : public KvCache {
 public:
  static kvshard::Result<ShardedPrefillKv> create(KvPool& pool, const kvshard::PageLayout& layout,
                                                  Peers& peers,
                                                  std::vector<kvshard::LogicalPage> pages);

  [[nodiscard]] const KvShape& shape() const noexcept override { return scratch_.shape(); }
  [[nodiscard]] std::size_t capacity_tokens() const noexcept override {
    return scratch_.capacity_tokens();
  }
  [[nodiscard]] bool runs(std::size_t position) const noexcept override {
    return place(position).rank == peers_->rank();
  }
  void store(std::size_t buffer, std::size_t position, std::span<const float> row) override;
  kvshard::Status exchange(std::size_t buffer, std::size_t first, std::size_t end) override;
  [[nodiscard]] std::span<const float> load(std::size_t buffer,
                                            std::size_t position) const override;

 private:
  ShardedPrefillKv(KvPool& pool, const kvshard::PageLayout& layout, Peers& peers,
                   std::vector<kvshard::LogicalPage> pages);
  [[nodiscard]] kvshard::Placement place(std::size_t position) const noexcept {
    return layout_.place(pages_[position / layout_.page_size()]);
  }

  KvPool* pool_;
  kvshard::PageLayout layout_;
  Peers* peers_;
  std::vector<kvshard::LogicalPage> pages_;
  ContiguousKv scratch_;
};

}  // namespace tiny_llm
