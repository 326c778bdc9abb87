// What planning costs a request: its units and where they start on both sides, for all layers, since
// one number says where a page lies in every buffer of its table. The baseline writes an offset for
// every page and layer, as an engine does that keeps descriptors.

#include <benchmark/benchmark.h>
#include <time.h>

#include <random>
#include <vector>

#include "kvshard/plan.hpp"

namespace kvshard {
namespace {

constexpr std::uint32_t kLayers = 61;
constexpr std::uint64_t kHeadBytes = 1152;  // latent KV

BufferGroup group(std::uint32_t page_size, std::uint32_t parts, std::uint32_t interleave) {
  return {.layers = kLayers,
          .buffers_per_layer = 1,
          .heads = 1,
          .head_bytes = kHeadBytes,
          .page_size = page_size,
          .page_count = 1U << 20,
          .parts = parts,
          .interleave = interleave};
}

// Time that this thread ran, so that a busy machine does not blur the figures.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Arguments: prefill parts, interleave (0: by page), prefill and decode page size, pages that the
// decode rank pulls from one prefill rank.
void plan_request(benchmark::State& state) {
  const auto argument = [&](int number) { return static_cast<std::uint32_t>(state.range(number)); };
  const BufferGroup prefill = group(argument(2), argument(0), argument(1));
  const BufferGroup decode = group(argument(3), 1, 0);
  const auto count = static_cast<std::size_t>(state.range(4));
  const Geometry from{.model_id = "m", .groups = {prefill}};
  const Geometry to{.model_id = "m", .groups = {decode}};
  const Lane lane{0, 0, kLayers, 0, 1};
  const auto plan = TransferPlan::create(from, to, {&lane, 1}).value();
  const auto& table = plan.tables()[0];
  const auto& buffers = plan.lanes()[0];

  std::mt19937 random{1};
  std::vector<LocalPage> pages(count * argument(0) * argument(2));
  for (LocalPage& page : pages) page = LocalPage{1 + static_cast<std::uint32_t>(random() % 1000)};
  std::vector<std::uint64_t> sources(count);
  std::vector<std::uint64_t> destinations(count);
  const std::uint64_t tokens =
      std::uint64_t{count} * table.tokens.unit_tokens() * argument(0);  // of which one part is ours
  const auto ours = [&] {
    const UnitList units = table.tokens.units(0, 0);
    const auto range = units.range(0, tokens);
    units.offsets(Side::prefill, range.first, pages, 0, buffers.prefill.page_stride,
                  buffers.prefill.token_stride, sources);
    units.offsets(Side::decode, range.first, pages, 0, buffers.decode.page_stride,
                  buffers.decode.token_stride, destinations);
    return range.end - range.first;
  };
  std::vector<std::uint64_t> descriptors(2 * count * kLayers);
  const auto each_layer = [&] {
    const UnitList units = table.tokens.units(0, 0);
    std::size_t at = 0;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t unit = 0; unit < count; ++unit) {
        const auto place = units[unit];
        descriptors[at++] = (std::uint64_t{layer} << 40) +
                            index(pages[place.prefill_page]) * buffers.prefill.page_stride +
                            place.prefill_token * buffers.prefill.token_stride;
        descriptors[at++] = (std::uint64_t{layer} << 40) +
                            index(pages[place.decode_page]) * buffers.decode.page_stride +
                            place.decode_token * buffers.decode.token_stride;
      }
    }
  };

  bool verified = ours() == count;
  each_layer();
  for (std::size_t unit = 0; unit < count; ++unit)
    verified = verified && sources[unit] == descriptors[2 * unit] &&
               destinations[unit] == descriptors[2 * unit + 1];
  if (!verified) {
    state.SkipWithError("the plan and its single places disagree");
    return;
  }

  double our_time = 0;
  double their_time = 0;
  for (auto _ : state) {
    const double start = thread_seconds();
    for (int i = 0; i < 16; ++i) {
      ours();
      benchmark::DoNotOptimize(sources.data());
      benchmark::DoNotOptimize(destinations.data());
      benchmark::ClobberMemory();
    }
    const double middle = thread_seconds();
    each_layer();
    benchmark::ClobberMemory();
    const double end = thread_seconds();
    our_time += (middle - start) / 16;
    their_time += end - middle;
    state.SetIterationTime((middle - start) / 16);
  }
  state.SetItemsProcessed(state.iterations() * state.range(4));
  state.counters["ratio"] = their_time / our_time;
}
BENCHMARK(plan_request)
    ->ArgNames({"N", "interleave", "page", "decode_page", "pages"})
    ->Args({1, 0, 64, 64, 10000})
    ->Args({8, 0, 64, 64, 10000})
    ->Args({8, 0, 16, 64, 10000})
    ->Args({3, 0, 64, 64, 10000})
    ->Args({8, 8, 64, 64, 10000})
    ->Args({8, 0, 64, 64, 32})
    ->Iterations(200)  // the baseline takes most of the time
    ->UseManualTime();

// Once at connect: 8 prefill ranks' shares for one of 8 decode ranks, and the plan with one of them.
void connect(benchmark::State& state) {
  std::vector<Geometry> prefill;
  for (std::uint32_t part = 0; part < 8; ++part) {
    prefill.push_back({.model_id = "m", .groups = {group(64, 8, 0)}, .rank = part, .ranks = 8});
    prefill.back().groups[0].part = part;
  }
  const Geometry decode{.model_id = "m", .groups = {group(64, 1, 0)}, .rank = 3, .ranks = 8};
  for (auto _ : state) {
    const auto lanes = assign_lanes(prefill, decode).value();
    auto plan = TransferPlan::create(prefill[0], decode, lanes[0]).value();
    benchmark::DoNotOptimize(plan);
  }
}
BENCHMARK(connect);

}  // namespace
}  // namespace kvshard

BENCHMARK_MAIN();
