// The send filter against the loop that one would write without it, on the same chunks in the same
// run, alternating. `ratio` is ids per second of the filter over those of the loop.

#include <benchmark/benchmark.h>
#include <time.h>

#include <random>
#include <vector>

#include "kvshard/send_filter.hpp"

namespace kvshard {
namespace {

// Without the checks: takes the owned pages of any list, one division per id.
struct PlainLoop {
  std::uint32_t shard_size;
  std::uint32_t shard_rank;
  std::vector<LocalPage> pages;
  std::vector<Position> positions;

  [[gnu::noinline]] std::size_t select(std::span<const LogicalPage> chunk, std::uint32_t first) {
    std::size_t count = 0;
    for (std::uint32_t k = 0; k < chunk.size(); ++k) {
      const auto page = index(chunk[k]);
      if (page % shard_size != shard_rank) continue;
      pages[count] = LocalPage{page / shard_size};
      positions[count] = Position{first + k};
      ++count;
    }
    return count;
  }
};

// Time that this thread ran: the two loops are pure computation, and a busy machine would blur the
// ratio.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Arguments: shard size, pages of the chunk.
void select_owned(benchmark::State& state) {
  const auto shard_size = static_cast<std::uint32_t>(state.range(0));
  const auto count = static_cast<std::size_t>(state.range(1));
  const auto layout = PageLayout::create(shard_size, 16).value();
  const auto rank = shard_size / 2;
  const auto filter = SendFilter::create(layout, rank).value();
  std::mt19937 random{1};
  std::vector<LogicalPage> chunk;
  for (std::size_t k = 0; k < count; ++k)
    chunk.push_back(
        layout.logical(layout.owner_after(1 % shard_size, k),
                       LocalPage{1 + static_cast<std::uint32_t>(random() % 1'000'000)}));
  std::vector<LocalPage> out(count);
  PlainLoop plain{shard_size, rank, std::vector<LocalPage>(count), std::vector<Position>(count)};

  const auto ours = filter.select(chunk, Position{7}, out).value();
  bool verified = plain.select(chunk, 7) == ours.pages.size();
  for (std::uint32_t i = 0; verified && i < ours.pages.size(); ++i)
    verified = plain.pages[i] == ours.pages[i] && plain.positions[i] == ours.position(i);
  if (!verified) {
    state.SkipWithError("the filter and the plain loop disagree");
    return;
  }

  const auto rounds = static_cast<int>(1 + (1 << 17) / count);
  double plain_time = 0;
  double our_time = 0;
  for (auto _ : state) {
    const auto start = thread_seconds();
    for (int i = 0; i < rounds; ++i) benchmark::DoNotOptimize(plain.select(chunk, 7));
    const auto middle = thread_seconds();
    for (int i = 0; i < rounds; ++i) {
      auto owned = filter.select(chunk, Position{7}, out);
      benchmark::DoNotOptimize(owned);
    }
    const auto end = thread_seconds();
    plain_time += middle - start;
    our_time += end - middle;
    state.SetIterationTime(end - middle);
  }
  state.SetItemsProcessed(state.iterations() * rounds * state.range(1));
  state.counters["baseline_ids_per_second"] =
      static_cast<double>(state.iterations()) * rounds * static_cast<double>(count) / plain_time;
  state.counters["ratio"] = plain_time / our_time;
}
BENCHMARK(select_owned)
    ->ArgNames({"N", "pages"})
    ->ArgsProduct({{1, 2, 3, 4, 5, 8, 16}, {2048}})
    ->ArgsProduct({{2, 8}, {32, 256, 1 << 17}})
    ->UseManualTime();

}  // namespace
}  // namespace kvshard

BENCHMARK_MAIN();
