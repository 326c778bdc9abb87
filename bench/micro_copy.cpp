// Host gather and scatter against memcpy of the same bytes, in turns within one run. `ratio` is the
// median time of one contiguous memcpy over ours; the bytes are compared first.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "copy/slot_format.hpp"
#include "kvshard/copy_engine.hpp"

namespace kvshard {
namespace {

using Nanoseconds = std::chrono::duration<double, std::nano>;

class Listener final : public CopyListener {
 public:
  void copy_done(Status status) noexcept override { ok = status.ok(); }
  bool ok{false};
};

// A pool much larger than the cache, so that pages are cold, and one slot, which is warm as a slot
// in turn is.
struct Rig {
  Rig(std::uint64_t page_bytes, std::uint64_t job_bytes, const FragmentShape& shape,
      std::uint32_t threads)
      : engine{make_copy_engine({.memory = MemoryKind::host, .host_threads = threads}).value()},
        pool{make_staging_memory(MemoryKind::host, 0, kPoolBytes).value()},
        slot{make_staging_memory(MemoryKind::host, 0, slot_bytes_for(job_bytes)).value()} {
    std::mt19937_64 random{1};
    for (std::size_t at = 0; at + 8 <= kPoolBytes; at += 8) {
      const std::uint64_t word = random();
      std::memcpy(&pool->bytes()[at], &word, 8);
    }
    pages_per_buffer = kPoolBytes / kLayers / page_bytes;
    for (std::size_t layer = 0; layer < kLayers; ++layer)
      buffers.push_back(&pool->bytes()[layer * pages_per_buffer * page_bytes]);
    order.resize(pages_per_buffer);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::ranges::shuffle(order, random);
    for (std::uint64_t& offset : order) offset *= page_bytes;
    pages_per_job = std::max<std::size_t>(1, job_bytes / kLayers / shape.bytes());
    batch = {buffers, std::span{order}.first(pages_per_job), shape};
    job.slot = slot->bytes().data();
    job.batches = {&batch, 1};
    job.stamp = {.lease = 1, .generation = 1, .chunk = 0, .payload_bytes = batch.bytes()};
  }

  // The next job takes other pages.
  void advance() {
    first = first + 2 * pages_per_job <= order.size() ? first + pages_per_job : 0;
    batch.offsets = std::span{order}.subspan(first, pages_per_job);
  }
  bool run(CopyJob::Direction direction) {
    job.direction = direction;
    if (!engine->submit(job, listener).ok()) return false;
    while (engine->in_flight() != 0) engine->progress();
    return listener.ok;
  }

  static constexpr std::size_t kPoolBytes = std::size_t{512} << 20;
  static constexpr std::size_t kLayers = 16;
  std::unique_ptr<CopyEngine> engine;
  std::unique_ptr<StagingMemory> pool;
  std::unique_ptr<StagingMemory> slot;
  std::vector<std::byte*> buffers;
  std::vector<std::uint64_t> order;
  std::size_t pages_per_buffer{0};
  std::size_t pages_per_job{0};
  std::size_t first{0};
  FragmentBatch batch;
  CopyJob job;
  Listener listener;
};

bool verify(Rig& rig) {
  if (!rig.run(CopyJob::Direction::gather)) return false;
  const std::byte* at = rig.job.slot + kSlotHeaderBytes;
  const FragmentShape& shape = rig.batch.shape;
  for (std::byte* const buffer : rig.batch.buffers)
    for (const std::uint64_t offset : rig.batch.offsets)
      for (std::uint32_t outer = 0; outer < shape.outer; ++outer, at += shape.row_bytes)
        if (std::memcmp(at, buffer + offset + outer * shape.outer_stride, shape.row_bytes) != 0)
          return false;
  return rig.run(CopyJob::Direction::scatter);
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

void measure(benchmark::State& state, Rig& rig, CopyJob::Direction direction) {
  if (!verify(rig)) {
    state.SkipWithError("bytes differ");
    return;
  }
  const std::uint64_t bytes = rig.batch.bytes();
  std::byte* const payload = rig.job.slot + kSlotHeaderBytes;
  std::vector<double> ours;
  std::vector<double> memcpys;
  std::size_t at = 0;
  for (auto _ : state) {
    rig.advance();
    const auto start = std::chrono::steady_clock::now();
    if (!rig.run(direction)) {
      state.SkipWithError("copy failed");
      return;
    }
    const auto middle = std::chrono::steady_clock::now();
    std::byte* const cold = &rig.pool->bytes()[at];  // as cold as the pages, but contiguous
    if (direction == CopyJob::Direction::gather)
      std::memcpy(payload, cold, bytes);
    else
      std::memcpy(cold, payload, bytes);
    benchmark::ClobberMemory();
    const auto end = std::chrono::steady_clock::now();
    at = at + 2 * bytes <= Rig::kPoolBytes ? at + bytes : 0;
    ours.push_back(Nanoseconds{middle - start}.count());
    memcpys.push_back(Nanoseconds{end - middle}.count());
    state.SetIterationTime(std::chrono::duration<double>{middle - start}.count());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes) * state.iterations());
  state.counters["ratio"] = median(memcpys) / median(ours);
  state.counters["p50_us"] = median(ours) / 1000;
}

void pages(benchmark::State& state, CopyJob::Direction direction) {
  const auto page_bytes = static_cast<std::uint64_t>(state.range(0));
  Rig rig{page_bytes,
          static_cast<std::uint64_t>(state.range(1)),
          {.row_bytes = page_bytes},
          static_cast<std::uint32_t>(state.range(3))};
  rig.job.checksum = state.range(2) != 0;
  measure(state, rig, direction);
}
// Half of the heads of token-major pages of 16 tokens: rows of state.range(0) bytes.
void head_slices(benchmark::State& state, CopyJob::Direction direction) {
  const auto row_bytes = static_cast<std::uint64_t>(state.range(0));
  Rig rig{32 * row_bytes,
          static_cast<std::uint64_t>(state.range(1)),
          {.outer = 16, .outer_stride = 2 * row_bytes, .row_bytes = row_bytes},
          static_cast<std::uint32_t>(state.range(3))};
  rig.job.checksum = state.range(2) != 0;
  measure(state, rig, direction);
}

// The strided fragments of unlike layouts against whole pages of as many bytes, in turns: `ratio` is the
// time of whole pages over that of the slices. Rows of state.range(0) bytes, pages of 16 tokens.
void against_pages(benchmark::State& state, CopyJob::Direction direction, bool interleave) {
  constexpr std::uint64_t kJobBytes = 4 << 20;
  const auto row = static_cast<std::uint64_t>(state.range(0));
  // A slice of half of the heads; or every other token of a pool whose peer interleaves tokens by 1.
  const FragmentShape slices{
      .outer = interleave ? 8U : 16U, .outer_stride = 2 * row, .row_bytes = row};
  Rig strided{interleave ? 16 * row : 32 * row, kJobBytes, slices, 1};
  Rig whole{slices.bytes(), kJobBytes, {.row_bytes = slices.bytes()}, 1};
  if (!verify(strided) || !verify(whole)) return state.SkipWithError("bytes differ");
  std::vector<double> ours, pages;
  for (auto _ : state) {
    strided.advance();
    whole.advance();
    const auto start = std::chrono::steady_clock::now();
    const bool first = strided.run(direction);
    const auto middle = std::chrono::steady_clock::now();
    const bool second = whole.run(direction);
    const auto end = std::chrono::steady_clock::now();
    if (!first || !second) return state.SkipWithError("copy failed");
    ours.push_back(Nanoseconds{middle - start}.count());
    pages.push_back(Nanoseconds{end - middle}.count());
    state.SetIterationTime(std::chrono::duration<double>{middle - start}.count());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(strided.batch.bytes()) * state.iterations());
  state.counters["ratio"] = median(pages) / median(ours);
  state.counters["p50_us"] = median(ours) / 1000;
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"fragment", "job", "checksum", "threads"})->UseManualTime()->MinTime(0.2);
  for (const std::int64_t fragment : {1024, 4096, 16384, 73728})
    for (const std::int64_t job : {std::int64_t{4} << 20, std::int64_t{32} << 20})
      bench->Args({fragment, job, 0, 1});
  bench->Args({16384, 4 << 20, 1, 1})->Args({16384, 4 << 20, 0, 2})->Args({16384, 4 << 20, 1, 2});
  bench->Args({16384, 1 << 20, 0, 1})->Args({16384, 1 << 20, 0, 2});
}
void row_sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"row", "job", "checksum", "threads"})->UseManualTime()->MinTime(0.2);
  for (const std::int64_t row : {64, 128, 256, 1024}) bench->Args({row, 4 << 20, 0, 1});
}

void slice_rows(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"row"})->UseManualTime()->MinTime(0.2);
  for (const std::int64_t row : {64, 128, 256, 512, 1024}) bench->Args({row});
}

BENCHMARK_CAPTURE(pages, gather, CopyJob::Direction::gather)->Apply(sizes);
BENCHMARK_CAPTURE(pages, scatter, CopyJob::Direction::scatter)->Apply(sizes);
BENCHMARK_CAPTURE(head_slices, gather, CopyJob::Direction::gather)->Apply(row_sizes);
BENCHMARK_CAPTURE(head_slices, scatter, CopyJob::Direction::scatter)->Apply(row_sizes);
BENCHMARK_CAPTURE(against_pages, heads_gather, CopyJob::Direction::gather, false)
    ->Apply(slice_rows);
BENCHMARK_CAPTURE(against_pages, heads_scatter, CopyJob::Direction::scatter, false)
    ->Apply(slice_rows);
BENCHMARK_CAPTURE(against_pages, tokens_gather, CopyJob::Direction::gather, true)
    ->Apply(slice_rows);
BENCHMARK_CAPTURE(against_pages, tokens_scatter, CopyJob::Direction::scatter, true)
    ->Apply(slice_rows);

}  // namespace
}  // namespace kvshard

BENCHMARK_MAIN();
