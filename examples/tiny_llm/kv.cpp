#include "tiny_llm/kv.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace tiny_llm {
namespace {

using kvshard::Error;
using kvshard::ErrorCode;
using kvshard::LocalPage;
using kvshard::LogicalPage;
using kvshard::PageLayout;
using kvshard::Result;
using kvshard::Status;

constexpr std::uint64_t kMaxPoolBytes = std::uint64_t{64} << 30;

Status check_page(const KvPool& pool, LocalPage page, std::size_t position) {
  if (index(page) != 0 && index(page) < pool.page_count()) return {};
  return Error{ErrorCode::invalid_argument, "position " + std::to_string(position) +
                                                ": local page " + std::to_string(index(page)) +
                                                " is not in [1, " +
                                                std::to_string(pool.page_count()) + ")"};
}

}  // namespace

Result<KvPool> KvPool::create(const KvShape& shape, std::uint32_t page_size,
                              std::uint32_t page_count) {
  if (shape.buffers() == 0 || shape.row_floats() == 0 || page_size == 0 || page_count == 0) {
    return Error{ErrorCode::invalid_argument,
                 "a pool of " + std::to_string(page_count) + " pages of " +
                     std::to_string(page_size) + " tokens, " + std::to_string(shape.row_floats()) +
                     " floats each, in " + std::to_string(shape.buffers()) + " buffers is empty"};
  }
  // Divided, not multiplied: four 32-bit sizes can wrap 64 bits.
  const std::uint64_t tokens = std::uint64_t{page_size} * page_count;
  const std::uint64_t token_bytes = std::uint64_t{shape.row_floats()} * sizeof(float);
  if (token_bytes > kMaxPoolBytes / shape.buffers() ||
      tokens > kMaxPoolBytes / shape.buffers() / token_bytes) {
    return Error{ErrorCode::invalid_argument,
                 std::to_string(tokens) + " tokens of " + std::to_string(token_bytes) +
                     " bytes in " + std::to_string(shape.buffers()) + " buffers exceed " +
                     std::to_string(kMaxPoolBytes) + " bytes"};
  }
  return KvPool{shape, page_size, page_count};
}

KvPool::KvPool(const KvShape& shape, std::uint32_t page_size, std::uint32_t page_count)
    : shape_{shape},
      page_size_{page_size},
      page_count_{page_count},
      buffers_(shape.buffers(), std::vector<float>(page_floats() * page_count,
                                                   std::numeric_limits<float>::quiet_NaN())) {}

std::span<float> KvPool::page(std::size_t buffer, LocalPage page) noexcept {
  return std::span{buffers_[buffer]}.subspan(index(page) * page_floats(), page_floats());
}

std::span<const float> KvPool::page(std::size_t buffer, LocalPage page) const noexcept {
  return std::span{buffers_[buffer]}.subspan(index(page) * page_floats(), page_floats());
}

kvshard::Geometry kv_geometry(const KvShape& shape, std::uint32_t page_size,
                              std::uint32_t page_count, std::string model_id) {
  kvshard::BufferGroup group;
  group.name = "kv";
  group.layers = shape.layers;
  group.buffers_per_layer = shape.buffers_per_layer;
  group.element_type = kvshard::ElementType::f32;
  group.heads = shape.heads;
  group.head_bytes = static_cast<std::uint32_t>(shape.head_floats * sizeof(float));
  group.order = kvshard::PageOrder::token_major;
  group.page_size = page_size;
  group.page_count = page_count;
  return {.model_id = std::move(model_id), .groups = {std::move(group)}};
}

kvshard::Pool KvPool::describe(std::string model_id) {
  std::vector<std::byte*> starts;
  for (auto& buffer : buffers_) starts.push_back(std::as_writable_bytes(std::span{buffer}).data());
  return {.geometry = kv_geometry(shape_, page_size_, page_count_, std::move(model_id)),
          .buffers = {std::move(starts)}};
}

ContiguousKv::ContiguousKv(const KvShape& shape, std::size_t capacity_tokens)
    : shape_{shape},
      capacity_tokens_{capacity_tokens},
      buffers_(shape.buffers(), std::vector<float>(capacity_tokens * shape.row_floats())) {}

void ContiguousKv::store(std::size_t buffer, std::size_t position, std::span<const float> row) {
  std::ranges::copy(row, std::span{buffers_[buffer]}.subspan(position * row.size()).begin());
}

std::span<const float> ContiguousKv::load(std::size_t buffer, std::size_t position) const {
  return std::span{buffers_[buffer]}.subspan(position * shape_.row_floats());
}

Result<PagedKv> PagedKv::create(KvPool& pool, std::vector<LocalPage> pages) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (Status status = check_page(pool, pages[i], i); !status) return status.error();
  }
  return PagedKv{pool, std::move(pages)};
}

std::size_t PagedKv::capacity_tokens() const noexcept {
  return pages_.size() * pool_->page_size();
}

void PagedKv::store(std::size_t buffer, std::size_t position, std::span<const float> row) {
  const auto page = pool_->page(buffer, pages_[position / pool_->page_size()]);
  std::ranges::copy(row, page.subspan(position % pool_->page_size() * row.size()).begin());
}

std::span<const float> PagedKv::load(std::size_t buffer, std::size_t position) const {
  const auto page = pool_->page(buffer, pages_[position / pool_->page_size()]);
  return page.subspan(position % pool_->page_size() * shape().row_floats());
}

Result<ShardedPrefillKv> ShardedPrefillKv::create(KvPool& pool, const PageLayout& layout,
                                                  Peers& peers, std::vector<LogicalPage> pages) {
  if (peers.size() != layout.shard_size() || peers.rank() >= layout.shard_size() ||
      pool.page_size() != layout.page_size()) {
    return Error{ErrorCode::invalid_argument,
                 "rank " + std::to_string(peers.rank()) + " of " + std::to_string(peers.size()) +
                     " with pages of " + std::to_string(pool.page_size()) +
                     " tokens in a layout of " + std::to_string(layout.shard_size()) + " with " +
                     std::to_string(layout.page_size())};
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    // Also for pages of other ranks: all ranks have equal pools.
    if (Status status = check_page(pool, layout.place(pages[i]).page, i); !status)
      return status.error();
  }
  return ShardedPrefillKv{pool, layout, peers, std::move(pages)};
}

ShardedPrefillKv::ShardedPrefillKv(KvPool& pool, const PageLayout& layout, Peers& peers,
                                   std::vector<LogicalPage> pages)
    : pool_{&pool},
      layout_{layout},
      peers_{&peers},
      pages_{std::move(pages)},
      scratch_{pool.shape(), pages_.size() * pool.page_size()} {}

void ShardedPrefillKv::store(std::size_t buffer, std::size_t position, std::span<const float> row) {
  scratch_.store(buffer, position, row);
  const auto page = pool_->page(buffer, place(position).page);
  std::ranges::copy(row, page.subspan(position % layout_.page_size() * row.size()).begin());
}

Status ShardedPrefillKv::exchange(std::size_t buffer, std::size_t first, std::size_t end) {
  const std::size_t row_floats = shape().row_floats();
  std::vector<float> own;
  for (std::size_t position = first; position < end; ++position) {
    if (!runs(position)) continue;
    const auto row = load(buffer, position).first(row_floats);
    own.insert(own.end(), row.begin(), row.end());
  }
  const auto gathered = peers_->all_gather(own);
  if (!gathered) return gathered.error();
  if (gathered->size() != (end - first) * row_floats) {
    return Error{ErrorCode::internal, "the ranks gathered " + std::to_string(gathered->size()) +
                                          " floats, not " +
                                          std::to_string((end - first) * row_floats)};
  }
  // Rank after rank, each one's positions in order.
  std::span<const float> rest{*gathered};
  for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank) {
    for (std::size_t position = first; position < end; ++position) {
      if (place(position).rank != rank) continue;
      scratch_.store(buffer, position, rest.first(row_floats));
      rest = rest.subspan(row_floats);
    }
  }
  return {};
}

std::span<const float> ShardedPrefillKv::load(std::size_t buffer, std::size_t position) const {
  return scratch_.load(buffer, position);
}

}  // namespace tiny_llm
