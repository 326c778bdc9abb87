#include "bench/workload.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include "base/try.hpp"
#include "kvshard/page_allocator.hpp"

namespace kvshard::bench {
namespace {

constexpr std::array kModels{
    ModelShape{"llama3-70b-tp1", 80, 2, 8, 128, ElementType::bf16, 2},
    ModelShape{"llama3-70b-tp8", 80, 2, 1, 128, ElementType::bf16, 2},
    ModelShape{"deepseek-v3", 61, 1, 1, 576, ElementType::bf16, 2},  // MLA: 512 latent, 64 rope
    ModelShape{"qwen3-30b-a3b", 48, 2, 4, 128, ElementType::bf16, 2},
};

// Rank `rank` of `count` holds its share of the heads; with fewer heads than ranks neighbours are replicas.
BufferGroup by_head(BufferGroup group, std::uint32_t rank, std::uint32_t count) {
  group.total_heads = group.heads;
  group.first_head = rank * group.heads / count;
  group.heads = std::max(1U, group.heads / count);
  return group;
}

// Local pages 1 .. count of one pool, of which a share changes places.
std::vector<LocalPage> scatter(std::uint32_t count, double share, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<LocalPage> pages(count);
  for (std::uint32_t i = 0; i < count; ++i) pages[i] = LocalPage{i + 1};
  std::vector<std::uint32_t> moved(count);
  std::iota(moved.begin(), moved.end(), 0U);
  std::shuffle(moved.begin(), moved.end(), random);
  moved.resize(static_cast<std::size_t>(share * count));
  for (std::size_t i = moved.size(); i > 1; --i)
    std::swap(pages[moved[i - 1]], pages[moved[random() % i]]);
  return pages;
}

std::uint64_t content_of(std::uint32_t request, std::uint32_t position) {
  return (std::uint64_t{request} << 32) | position;
}

}  // namespace

std::span<const ModelShape> model_shapes() {
  return kModels;
}

Result<ModelShape> find_model(std::string_view name) {
  const auto found = std::ranges::find(kModels, name, &ModelShape::name);
  if (found != kModels.end()) return *found;
  std::vector<std::string_view> names;
  for (const ModelShape& model : kModels) names.push_back(model.name);
  return Error{ErrorCode::invalid_argument,
               fmt::format("model {} is none of {}", name, fmt::join(names, ", "))};
}

Result<Workload> Workload::create(const PullConfig& config) {
  KVSHARD_TRY(const ModelShape model, find_model(config.model));
  KVSHARD_TRY(const PageLayout layout, PageLayout::create(config.prefill, config.page_size));
  for (const std::uint32_t tp : {config.prefill_tp, config.decode_tp}) {
    if (tp == 0 || (model.heads % tp != 0 && tp % model.heads != 0))
      return Error{ErrorCode::invalid_argument,
                   fmt::format("{} heads over {} ranks", model.heads, tp)};
  }
  Workload made{config, layout};
  made.pages_ = static_cast<std::uint32_t>(layout.pages_for(config.tokens));
  const std::uint64_t all_pages = std::uint64_t{made.pages_} * config.concurrency;
  if (all_pages == 0 || all_pages > (1U << 24))
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} requests of {} pages", config.concurrency, made.pages_)};
  const auto decode_pages = static_cast<std::uint32_t>(all_pages);
  const std::uint32_t prefill_pages =
      static_cast<std::uint32_t>(layout.share(made.pages_)) * config.concurrency;

  BufferGroup group{.layers = config.layers == 0 ? model.layers : config.layers,
                    .buffers_per_layer = model.buffers_per_layer,
                    .element_type = model.element_type,
                    .heads = model.heads,
                    .head_bytes = model.head_bytes(),
                    .page_size = config.page_size};
  for (std::uint32_t tp = 0; tp < config.prefill_tp; ++tp) {
    for (std::uint32_t shard = 0; shard < config.prefill; ++shard) {
      Geometry geometry{.model_id = config.model,
                        .groups = {by_head(group, tp, config.prefill_tp)},
                        .rank = tp * config.prefill + shard,
                        .ranks = config.prefill_ranks()};
      geometry.groups[0].page_count = prefill_pages + 1;
      geometry.groups[0].parts = config.prefill;
      geometry.groups[0].part = shard;
      made.prefill_.push_back(std::move(geometry));
    }
  }
  for (std::uint32_t tp = 0; tp < config.decode_tp; ++tp) {
    Geometry geometry{.model_id = config.model,
                      .groups = {by_head(group, tp, config.decode_tp)},
                      .rank = tp,
                      .ranks = config.decode_tp};
    geometry.groups[0].page_count = decode_pages + 1;
    made.decode_.push_back(std::move(geometry));
  }

  KVSHARD_TRY(auto allocator, PageAllocator::create(layout, prefill_pages, FreeOrder::ascending));
  made.source_.resize(all_pages);
  for (std::uint32_t request = 0; request < config.concurrency; ++request)
    KVSHARD_TRY(allocator.draw_chain(
        std::span{made.source_}.subspan(std::size_t{request} * made.pages_, made.pages_)));
  std::vector<std::vector<LocalPage>> moved;
  for (std::uint32_t rank = 0; rank < config.prefill; ++rank)
    moved.push_back(scatter(prefill_pages, config.fragmentation, rank));
  for (LogicalPage& page : made.source_) {
    const Placement place = layout.place(page);
    page = layout.logical(place.rank, moved[place.rank][index(place.page) - 1]);
  }
  // What one shard sends lands on neighbouring pages, as far as there are any.
  const std::vector<LocalPage> free = scatter(decode_pages, config.fragmentation, 1000);
  const ClassMajorOrder order{layout, Position{0}, made.pages_};
  for (std::uint32_t request = 0; request < config.concurrency; ++request) {
    for (std::uint32_t p = 0; p < made.pages_; ++p)
      made.destination_.push_back(
          free[std::size_t{request} * made.pages_ + order.destination(Position{p})]);
  }
  return made;
}

std::uint64_t Workload::bytes_per_decode_rank() const {
  const BufferGroup& group = decode_[0].groups[0];
  return group.page_bytes() * group.buffers() * pages_ * config_.concurrency;
}

std::uint64_t Workload::fragment_bytes() const {
  const BufferGroup& from = prefill_[0].groups[0];
  const BufferGroup& to = decode_[0].groups[0];
  if (from.heads == to.heads) return to.page_bytes();
  return std::uint64_t{std::min(from.heads, to.heads)} * to.head_bytes;  // a head slice of a token
}

std::vector<PageContent> Workload::prefill_content(std::uint32_t rank) const {
  std::vector<PageContent> content;
  for (std::uint32_t request = 0; request < requests(); ++request) {
    for (std::uint32_t p = 0; p < pages_; ++p) {
      const Placement place = layout_.place(source(request)[p]);
      if (place.rank == prefill_[rank].groups[0].part)
        content.push_back({place.page, content_of(request, p)});
    }
  }
  return content;
}

std::vector<PageContent> Workload::decode_content() const {
  std::vector<PageContent> content;
  for (std::uint32_t request = 0; request < requests(); ++request) {
    for (std::uint32_t p = 0; p < pages_; ++p)
      content.push_back({destination(request)[p], content_of(request, p)});
  }
  return content;
}

}  // namespace kvshard::bench
