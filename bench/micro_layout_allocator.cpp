// The page allocator: draw and free of one chain, and of a whole pool.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kvshard/page_allocator.hpp"

namespace kvshard {
namespace {

PageAllocator allocator_of(std::uint32_t shard_size, std::uint32_t pages_per_rank,
                           FreeOrder order) {
  return PageAllocator::create(PageLayout::create(shard_size, 16).value(), pages_per_rank, order)
      .value();
}

// Leaves half of the pool free, in pieces: what a server looks like after a while.
void fragment(PageAllocator& allocator) {
  std::mt19937 random{1};
  std::vector<std::vector<LogicalPage>> chains;
  for (;;) {
    std::vector<LogicalPage> chain(1 + random() % 64);
    if (!allocator.draw_chain(chain)) break;
    chains.push_back(std::move(chain));
  }
  std::shuffle(chains.begin(), chains.end(), random);
  for (std::size_t i = 0; i < chains.size() / 2; ++i) (void)allocator.free_chain(chains[i]);
}

// Arguments: shard size, order, pages of the chain. One iteration draws and frees it.
void draw_and_free(benchmark::State& state) {
  const auto shard_size = static_cast<std::uint32_t>(state.range(0));
  const auto order = static_cast<FreeOrder>(state.range(1));
  std::vector<LogicalPage> pages(static_cast<std::size_t>(state.range(2)));
  auto allocator = allocator_of(
      shard_size, static_cast<std::uint32_t>(4 * pages.size() / shard_size + 64), order);
  fragment(allocator);
  const auto before = allocator.used_pages();
  for (auto _ : state) {
    if (!allocator.draw_chain(pages)) state.SkipWithError("draw refused");
    benchmark::DoNotOptimize(pages.data());
    if (!allocator.free_chain(pages)) state.SkipWithError("free refused");
  }
  if (allocator.used_pages() != before) state.SkipWithError("pages leaked");
  state.SetItemsProcessed(state.iterations() * state.range(2));
}
BENCHMARK(draw_and_free)
    ->ArgNames({"N", "ascending", "pages"})
    ->ArgsProduct({{1, 2, 4, 8, 16}, {0, 1}, {2048}})
    ->ArgsProduct({{1, 8}, {0, 1}, {16, 1 << 20}});

// A batch of 64 requests of 32 pages: bases, checks and lists of many short chains.
void batch_draw_and_free(benchmark::State& state) {
  constexpr std::size_t kRequests = 64;
  constexpr std::size_t kPages = 32;
  auto allocator =
      allocator_of(static_cast<std::uint32_t>(state.range(0)), 4096, FreeOrder::last_freed_first);
  std::vector<LogicalPage> pages(kRequests * kPages);
  std::vector<DrawSegment> draws;
  std::vector<FreeSegment> frees(kRequests);
  for (std::size_t i = 0; i < kRequests; ++i)
    draws.push_back({{}, Position{0}, std::span{pages}.subspan(i * kPages, kPages)});
  for (auto _ : state) {
    if (!allocator.draw(draws)) state.SkipWithError("draw refused");
    for (std::size_t i = 0; i < kRequests; ++i)
      frees[i] = {allocator.layout().owner(draws[i].pages[0]), Position{0}, draws[i].pages};
    if (!allocator.free(frees)) state.SkipWithError("free refused");
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(pages.size()));
}
BENCHMARK(batch_draw_and_free)->ArgName("N")->Arg(2)->Arg(8);

}  // namespace
}  // namespace kvshard

BENCHMARK_MAIN();
