// The CUDA kernels and the CUDA copy engine against what CUDA itself offers for the same bytes. Prints one
// JSON object a line; `ratio` is ours over the baseline, which runs in turns with ours.
//
//   gpu_copy_bench [--quick] [NAME]
//
// With NAME only what is so called ("slot", "page", "engine_latency", ...).
// Bytes are compared first, by a kernel that shares no code with ours. Pages are random, in 64 layers, unless
// the name says otherwise.
// Before each timed copy of either side the second-level cache is flushed.

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/slot_copy.cuh"
#include "kernels/slot_copy.hpp"
#include "kvshard/copy_engine.hpp"

namespace {

using kvshard::CopyEngine;
using kvshard::CopyJob;
using kvshard::FragmentBatch;
using kvshard::FragmentShape;
namespace kernels = kvshard::kernels;

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint32_t kLayers = 64;
constexpr std::uint64_t kFlushBytes = 256 * kMiB;
constexpr std::uint64_t kReadBytes = 96 * kMiB;  // more than the cache holds

void check(cudaError_t error, const char* call, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_copy_bench.cu:%d: %s: %s\n", line, call, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK_CUDA(call) check((call), #call, __LINE__)

template <typename T>
T* device_memory(std::uint64_t count) {
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

__global__ void fill_kernel(std::uint32_t* words, std::uint64_t count, std::uint32_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += step) {
    std::uint64_t x = (i + seed) * 0x9e3779b97f4a7c15ULL;
    x ^= x >> 29;
    words[i] = static_cast<std::uint32_t>((x * 0xbf58476d1ce4e5b9ULL) >> 32);
  }
}

// Counts 4-byte words of the payload that differ from the pages, by plain 64-bit division.
__global__ void compare_kernel(kernels::Fragments f, const std::byte* payload,
                               unsigned long long* wrong) {
  const std::uint64_t fragment = std::uint64_t{f.outer} * f.inner * f.row_bytes;
  const std::uint64_t total = fragment * f.buffer_count * f.offset_count;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x * 4;
  for (std::uint64_t at = (blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x) * 4; at < total;
       at += step) {
    const std::uint64_t page = at / fragment % f.offset_count;
    const std::uint64_t row = at % fragment / f.row_bytes;
    const std::uint64_t from = f.buffers[at / fragment / f.offset_count] + f.offsets[page] +
                               row / f.inner * f.outer_stride + row % f.inner * f.inner_stride +
                               at % f.row_bytes;
    if (*reinterpret_cast<const std::uint32_t*>(from) !=
        *reinterpret_cast<const std::uint32_t*>(payload + at))
      atomicAdd(wrong, 1ULL);
  }
}

// Brings descriptors into the cache, as the engine's copy of them does just before each launch.
__global__ void touch_kernel(const std::uint64_t* words, std::uint64_t count,
                             unsigned long long* sink) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = threadIdx.x; i < count; i += blockDim.x) sum += words[i];
  if (sum == 1) *sink = sum;
}

// As a decode step does: reads weights, all of the memory's speed.
__global__ void read_kernel(const uint4* words, std::uint64_t count, unsigned* sink) {
  unsigned sum = 0;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x)
    sum += words[i].x ^ words[i].w;
  if (sum == 0x12345678U) *sink = sum;
}

struct Times {
  double p50_us;
  double p99_us;
};
Times summarize(std::vector<double>& us) {
  std::ranges::sort(us);
  return {us[us.size() / 2], us[std::min(us.size() - 1, us.size() * 99 / 100)]};
}

class Bench {
 public:
  Bench(bool quick, std::string only) : quick_{quick}, only_{std::move(only)} {
    const std::uint64_t top = quick ? 64 * kMiB : 2048 * kMiB;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) CHECK_CUDA(cudaEventCreate(&event));
    std::size_t free = 0;
    std::size_t total = 0;
    CHECK_CUDA(cudaMemGetInfo(&free, &total));
    pool_bytes_ = quick ? top + top / 2 : std::max(top + top / 2, free / 4 / kMiB * kMiB);
    pool_ = device_memory<std::byte>(pool_bytes_);
    other_ = device_memory<std::byte>(pool_bytes_);
    slot_ = device_memory<std::byte>(kvshard::slot_bytes_for(top));
    flush_ = device_memory<std::byte>(kFlushBytes);
    wrong_ = device_memory<unsigned long long>(1);
    sums_ = device_memory<std::uint64_t>(kernels::kChecksumSums);
    found_ = device_memory<kernels::SlotFound>(1);
    CHECK_CUDA(cudaMemset(sums_, 0, kernels::kChecksumSums * 8));
    buffers_ = device_memory<std::uint64_t>(kLayers);
    offsets_ = device_memory<std::uint64_t>(pool_bytes_ / kLayers / kKiB);
    to_buffers_ = device_memory<std::uint64_t>(kLayers);
    fill(other_, pool_bytes_, 1);
    int major = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    bulk_ = major >= 9;
    if (bulk_) CHECK_CUDA(kernels::prepare_bulk_copies());
    read_environment();
  }

  struct Case {
    const char* bench;
    std::string params;
    std::uint64_t payload_bytes;
    FragmentShape shape;
    std::uint64_t page_bytes;  // apart in the pool
    std::uint32_t max_sms{0};
    bool checksum{false};
    int repeats{15};
    bool touched{false};  // descriptors are in the cache when the clock starts
    enum class Pages { random, ascending, adjacent, wide } pages{Pages::random};
    std::uint32_t pieces{1};  // of so many buffers each, in one launch
  };

  void slots(const Case& c) {
    if (!wanted(c.bench)) return;
    for (const bool scatter : {false, true}) {
      const std::uint64_t bytes = lay_out(c);
      std::vector<kernels::SlotPiece> pieces;
      for (std::uint32_t i = 0; i < c.pieces; ++i)
        pieces.push_back({part(fragments_, i, c.pieces), 0, bytes / c.pieces * i});
      const kernels::Slot slot{slot_, 1, 2, 3, bytes, c.checksum ? sums_ : nullptr, found_};
      const kernels::SlotCopyArgs args{pieces.data(), c.pieces, &slot, 1, 16, c.max_sms, bulk_};
      const auto ours = [&] {
        CHECK_CUDA(scatter ? kernels::launch_scatter(args, stream_)
                           : kernels::launch_gather(args, stream_));
      };
      fill(slot_, kvshard::slot_bytes_for(bytes), 5);
      ours();
      const bool verified = same(fragments_, slot_ + kernels::kHeaderBytes);
      std::byte* const payload = slot_ + kernels::kHeaderBytes;
      const auto baseline = [&] {
        copy(scatter ? other_ : payload, scatter ? payload : other_, bytes);
      };
      report(c, scatter ? "scatter" : "gather", bytes, verified, ours, "cudaMemcpyAsync D2D",
             baseline);
    }
  }

  void pull(const Case& c) {
    if (!wanted(c.bench)) return;
    const std::uint64_t bytes = lay_out(c);
    std::vector<kernels::PullPiece> pieces;
    for (std::uint32_t i = 0; i < c.pieces; ++i)
      pieces.push_back({part(fragments_, i, c.pieces), part(to_fragments(), i, c.pieces), 0, 0,
                        bytes / c.pieces});
    const kernels::PullArgs args{pieces.data(), c.pieces, 16, c.max_sms, bulk_};
    const auto ours = [&] { CHECK_CUDA(kernels::launch_pull(args, stream_)); };
    report(c, "pull", bytes, verified_pull(bytes, ours), ours, "cudaMemcpyAsync D2D",
           [&] { copy(slot_, other_, bytes); });
  }

  // Strided fragments against whole pages of as many bytes at the same places.
  void strided(const Case& c) {
    if (!wanted(c.bench)) return;
    for (const bool scatter : {false, true}) {
      const std::uint64_t bytes = lay_out(c);
      kernels::Fragments pages = fragments_;
      pages.outer = pages.inner = 1;
      pages.row_bytes = c.shape.bytes();
      const auto launch = [&](const kernels::Fragments& fragments) {
        const kernels::SlotPiece piece{fragments, 0, 0};
        const kernels::Slot slot{slot_, 1, 2, 3, bytes, nullptr, found_};
        const kernels::SlotCopyArgs args{&piece, 1, &slot, 1, 16, c.max_sms, bulk_};
        CHECK_CUDA(scatter ? kernels::launch_scatter(args, stream_)
                           : kernels::launch_gather(args, stream_));
      };
      fill(slot_, kvshard::slot_bytes_for(bytes), 5);
      launch(fragments_);
      const bool verified = same(fragments_, slot_ + kernels::kHeaderBytes);
      report(
          c, scatter ? "scatter" : "gather", bytes, verified, [&] { launch(fragments_); },
          "whole pages of the same bytes", [&] { launch(pages); });
    }
  }

  // One copy a page, as without kernels of our own.
  void per_page(const Case& c) {
    if (!wanted(c.bench)) return;
    const std::uint64_t bytes = lay_out(c);
    const kernels::SlotPiece piece{fragments_, 0, 0};
    const kernels::Slot slot{slot_, 1, 2, 3, bytes, nullptr, nullptr};
    const kernels::SlotCopyArgs args{&piece, 1, &slot, 1, 16, 0, bulk_};
    const auto gather = [&] { CHECK_CUDA(kernels::launch_gather(args, stream_)); };
    gather();
    const bool gathered = same(fragments_, slot_ + kernels::kHeaderBytes);
    std::vector<const void*> from;
    std::vector<void*> to_slot;
    std::vector<void*> to_pages;
    for (std::size_t layer = 0; layer < host_buffers_.size(); ++layer)
      for (const std::uint64_t offset : host_offsets_) {
        to_slot.push_back(slot_ + kernels::kHeaderBytes + from.size() * c.shape.row_bytes);
        from.push_back(reinterpret_cast<const void*>(host_buffers_[layer] + offset));
        to_pages.push_back(reinterpret_cast<void*>(host_to_buffers_[layer] + offset));
      }
    per_page(c, "gather", bytes, gathered, gather, from, to_slot);

    const kernels::PullPiece pulled{fragments_, to_fragments(), 0, 0, bytes};
    const kernels::PullArgs pull_args{&pulled, 1, 16, 0, bulk_};
    const auto pull = [&] { CHECK_CUDA(kernels::launch_pull(pull_args, stream_)); };
    per_page(c, "pull", bytes, verified_pull(bytes, pull), pull, from, to_pages);
  }

  // From submit() to copy_done(), by polling: one job alone, and 24 at once, each of one page in each layer.
  void engine_latency() {
    if (!wanted("engine_latency")) return;
    for (const int jobs : {1, 24}) {
      const Case c{"engine", "", 0, {.row_bytes = 16 * kKiB}, 16 * kKiB};
      lay_out({.bench = "",
               .params = "",
               .payload_bytes = 64 * kMiB,
               .shape = c.shape,
               .page_bytes = c.page_bytes});
      const auto engine = make_engine();
      EngineListener listener;
      const auto buffers = pointers(host_buffers_);
      const FragmentBatch batch{buffers, std::span{host_offsets_}.first(1), c.shape};
      const std::uint64_t stride = (kvshard::slot_bytes_for(batch.bytes()) + 255) / 256 * 256;
      const auto round = [&] {
        for (int i = 0; i < jobs; ++i) {
          CopyJob job;
          job.batches = {&batch, 1};
          job.slot = slot_ + static_cast<std::uint64_t>(i) * stride;
          job.stamp.payload_bytes = batch.bytes();
          listener.ok = listener.ok && engine->submit(job, listener).ok();
        }
        while (engine->in_flight() != 0) engine->progress();
      };
      for (int i = 0; i < 50; ++i) round();
      std::vector<double> us;
      for (int i = 0; i < 2000; ++i) us.push_back(wall_us(round));
      const Times times = summarize(us);
      std::printf(
          "{\"bench\":\"engine_latency\",\"params\":\"jobs=%d, 64 fragments of 16 KiB "
          "each\",\"bytes\":%llu,"
          "\"iterations\":2000,\"p50_ns\":%.0f,\"p99_ns\":%.0f,\"verified\":%s,%s}\n",
          jobs, static_cast<unsigned long long>(batch.bytes() * static_cast<std::uint64_t>(jobs)),
          times.p50_us * 1000, times.p99_us * 1000, listener.ok ? "true" : "false", env_.c_str());
    }
  }

  // Large pulls through the engine, one launch behind another, against one copy of all their bytes: what lies
  // between launches.
  void engine_stream(std::uint64_t bytes, std::uint32_t jobs) {
    if (!wanted("engine_stream")) return;
    const Case c{.bench = "engine_stream",
                 .params = std::to_string(jobs) + " pulls of " +
                           std::to_string(bytes / kMiB / jobs) + " MiB, fragment=4096 B, wall time",
                 .payload_bytes = bytes,
                 .shape = {.row_bytes = 4 * kKiB},
                 .page_bytes = 4 * kKiB};
    bytes = lay_out(c);
    const auto engine = make_engine();
    EngineListener listener;
    const auto from = pointers(host_buffers_);
    const auto to = pointers(host_to_buffers_);
    const std::size_t share = host_offsets_.size() / jobs;
    const auto pull = [&] {
      for (std::uint32_t i = 0; i < jobs; ++i) {
        const std::size_t count = i + 1 == jobs ? host_offsets_.size() - i * share : share;
        const auto offsets = std::span{host_offsets_}.subspan(i * share, count);
        const FragmentBatch source{from, offsets, c.shape};
        const FragmentBatch batch{to, offsets, c.shape};
        CopyJob job;
        job.direction = CopyJob::Direction::pull;
        job.batches = {&batch, 1};
        job.sources = {&source, 1};
        job.stamp.payload_bytes = batch.bytes();
        listener.ok = listener.ok && engine->submit(job, listener).ok();
        engine->progress();
      }
      while (engine->in_flight() != 0) engine->progress();
    };
    const bool verified = verified_pull(bytes, [&] {
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      pull();
    });
    std::vector<double> us[2];
    for (int i = 0; i < (quick_ ? 3 : 15); ++i) {
      us[0].push_back(wall_us(pull));
      us[1].push_back(wall_us([&] {
        copy(slot_, other_, bytes);
        CHECK_CUDA(cudaStreamSynchronize(stream_));
      }));
    }
    print(c, "pull", bytes, us[0], us[1], "cudaMemcpyAsync D2D", verified && listener.ok);
  }

  // How much slower a memory-bound kernel loop is while gathers run beside it.
  void beside_decode() {
    if (!wanted("decode_beside_gather")) return;
    cudaStream_t decode = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&decode, cudaStreamNonBlocking));
    lay_out({.bench = "",
             .params = "",
             .payload_bytes = 64 * kMiB,
             .shape = {.row_bytes = 16 * kKiB},
             .page_bytes = 16 * kKiB});
    const kernels::SlotPiece piece{fragments_, 0, 0};
    const std::uint64_t bytes = std::uint64_t{fragments_.offset_count} * kLayers * 16 * kKiB;
    const kernels::Slot slot{slot_, 1, 2, 3, bytes, nullptr, nullptr};
    cudaEvent_t gathered[2];
    for (cudaEvent_t& event : gathered) CHECK_CUDA(cudaEventCreate(&event));
    double alone = 0;
    for (const int max_sms : {-1, 0, 1, 2, 8}) {
      std::vector<double> us;
      double gather_gb = 0;
      for (int repeat = 0; repeat < 7; ++repeat) {
        constexpr int kSteps = 20;
        const int gathers = max_sms < 0 ? 0 : max_sms == 0 ? 60 : 4 * max_sms;
        const kernels::SlotCopyArgs args{
            &piece, 1, &slot, 1, 16, static_cast<std::uint32_t>(std::max(0, max_sms)), bulk_};
        CHECK_CUDA(cudaEventRecord(gathered[0], stream_));
        for (int i = 0; i < gathers; ++i) CHECK_CUDA(kernels::launch_gather(args, stream_));
        CHECK_CUDA(cudaEventRecord(gathered[1], stream_));
        CHECK_CUDA(cudaEventRecord(events_[0], decode));
        for (int i = 0; i < kSteps; ++i)
          read_kernel<<<132 * 8, 256, 0, decode>>>(reinterpret_cast<const uint4*>(other_),
                                                   kReadBytes / 16,
                                                   reinterpret_cast<unsigned*>(wrong_));
        CHECK_CUDA(cudaEventRecord(events_[1], decode));
        CHECK_CUDA(cudaDeviceSynchronize());
        us.push_back(elapsed_us(events_[0], events_[1]) / kSteps);
        if (gathers > 0)
          gather_gb =
              static_cast<double>(bytes) * gathers / elapsed_us(gathered[0], gathered[1]) / 1000;
      }
      const Times times = summarize(us);
      if (max_sms < 0) alone = times.p50_us;
      std::printf(
          "{\"bench\":\"decode_beside_gather\",\"params\":\"%s\",\"bytes\":%llu,\"iterations\":7,"
          "\"p50_ns\":%.0f,"
          "\"p99_ns\":%.0f,\"gather_gb_per_s\":%.1f,\"baseline\":\"no "
          "gather\",\"ratio\":%.3f,%s}\n",
          max_sms < 0    ? "alone"
          : max_sms == 0 ? "no cap"
                         : ("cap=" + std::to_string(max_sms)).c_str(),
          static_cast<unsigned long long>(kReadBytes), times.p50_us * 1000, times.p99_us * 1000,
          gather_gb, times.p50_us / alone, env_.c_str());
    }
  }

  [[nodiscard]] std::uint64_t pool_mib() const { return pool_bytes_ / kMiB; }
  [[nodiscard]] bool all_verified() const { return all_verified_; }
  [[nodiscard]] bool ran() const { return ran_; }

 private:
  struct EngineListener final : kvshard::CopyListener {
    void copy_done(kvshard::Status status) noexcept override { ok = ok && status.ok(); }
    bool ok{true};
  };
  static std::unique_ptr<kvshard::CopyEngine> make_engine() {
    return kvshard::make_copy_engine({.memory = kvshard::MemoryKind::cuda}).value();
  }
  static std::vector<std::byte*> pointers(const std::vector<std::uint64_t>& addresses) {
    std::vector<std::byte*> made;
    for (const std::uint64_t address : addresses)
      made.push_back(reinterpret_cast<std::byte*>(address));
    return made;
  }
  static double wall_us(const std::function<void()>& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
        .count();
  }

  bool wanted(const char* bench) {
    const bool asked = only_.empty() || only_ == bench;
    ran_ = ran_ || asked;
    return asked;
  }
  static double elapsed_us(cudaEvent_t begin, cudaEvent_t end) {
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) * 1000;
  }
  void fill(std::byte* memory, std::uint64_t bytes, std::uint32_t seed) {
    fill_kernel<<<2048, 256, 0, stream_>>>(reinterpret_cast<std::uint32_t*>(memory), bytes / 4,
                                           seed);
    CHECK_CUDA(cudaGetLastError());
  }
  void copy(void* to, const void* from, std::uint64_t bytes) {
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  bool same(const kernels::Fragments& f, const std::byte* payload) {
    unsigned long long wrong = 1;
    CHECK_CUDA(cudaMemsetAsync(wrong_, 0, sizeof wrong, stream_));
    compare_kernel<<<2048, 256, 0, stream_>>>(f, payload, wrong_);
    CHECK_CUDA(cudaMemcpyAsync(&wrong, wrong_, sizeof wrong, cudaMemcpyDeviceToHost, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    all_verified_ = all_verified_ && wrong == 0;
    return wrong == 0;
  }

  // Pages that hold the case's payload, in a pool half as large again, or the largest there is; returns the bytes.
  std::uint64_t lay_out(const Case& c) {
    const std::uint64_t fragment = c.shape.bytes();
    const std::uint64_t pages = c.payload_bytes / kLayers / fragment;
    const std::uint64_t pool_pages = pool_bytes_ / kLayers / c.page_bytes;
    const std::uint64_t spread =
        c.pages == Case::Pages::wide ? pool_pages : std::min(pool_pages, pages + pages / 2 + 1);
    host_offsets_.resize(spread);
    std::iota(host_offsets_.begin(), host_offsets_.end(), std::uint64_t{0});
    std::mt19937_64 random{1};
    std::ranges::shuffle(host_offsets_, random);
    if (c.pages == Case::Pages::adjacent) std::ranges::sort(host_offsets_);
    host_offsets_.resize(std::min(pages, spread));
    if (c.pages == Case::Pages::ascending) std::ranges::sort(host_offsets_);
    for (std::uint64_t& offset : host_offsets_) offset *= c.page_bytes;
    host_buffers_.clear();
    host_to_buffers_.clear();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      host_buffers_.push_back(reinterpret_cast<std::uintptr_t>(pool_) +
                              layer * spread * c.page_bytes);
      host_to_buffers_.push_back(reinterpret_cast<std::uintptr_t>(other_) +
                                 layer * spread * c.page_bytes);
    }
    fill(pool_, pool_bytes_, 3);
    CHECK_CUDA(cudaMemcpyAsync(buffers_, host_buffers_.data(), kLayers * 8, cudaMemcpyHostToDevice,
                               stream_));
    CHECK_CUDA(cudaMemcpyAsync(to_buffers_, host_to_buffers_.data(), kLayers * 8,
                               cudaMemcpyHostToDevice, stream_));
    CHECK_CUDA(cudaMemcpyAsync(offsets_, host_offsets_.data(), host_offsets_.size() * 8,
                               cudaMemcpyHostToDevice, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    fragments_ = {buffers_,
                  offsets_,
                  kLayers,
                  static_cast<std::uint32_t>(host_offsets_.size()),
                  c.shape.outer,
                  c.shape.inner,
                  c.shape.outer_stride,
                  c.shape.inner_stride,
                  c.shape.row_bytes};
    return kLayers * host_offsets_.size() * fragment;
  }

  void per_page(const Case& c, const char* what, std::uint64_t bytes, bool verified,
                const std::function<void()>& ours, std::vector<const void*>& from,
                std::vector<void*>& to) {
    report(c, what, bytes, verified, ours, "cudaMemcpyAsync per page", [&] {
      for (std::size_t i = 0; i < from.size(); ++i) copy(to[i], from[i], c.shape.row_bytes);
    });
#if CUDART_VERSION >= 13000
    std::vector<std::size_t> sizes(from.size(), c.shape.row_bytes);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    report(c, what, bytes, verified, ours, "cudaMemcpyBatchAsync", [&] {
      CHECK_CUDA(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(),
                                      &attributes, &first, 1, stream_));
    });
#endif
  }

  // The i-th of `parts` equal shares of the buffers.
  static kernels::Fragments part(kernels::Fragments f, std::uint32_t i, std::uint32_t parts) {
    f.buffer_count /= parts;
    f.buffers += i * f.buffer_count;
    return f;
  }
  kernels::Fragments to_fragments() const {
    kernels::Fragments to = fragments_;
    to.buffers = to_buffers_;
    return to;
  }
  // Clears the destination, pulls, and compares with what a gather of the sources gives.
  bool verified_pull(std::uint64_t bytes, const std::function<void()>& pull) {
    fill(other_, pool_bytes_, 9);
    pull();
    const kernels::SlotPiece piece{fragments_, 0, 0};
    const kernels::Slot slot{slot_, 1, 2, 3, bytes, nullptr, nullptr};
    const kernels::SlotCopyArgs gather{&piece, 1, &slot, 1, 16, 0, bulk_};
    CHECK_CUDA(kernels::launch_gather(gather, stream_));
    const bool sources = same(fragments_, slot_ + kernels::kHeaderBytes);
    return same(to_fragments(), slot_ + kernels::kHeaderBytes) && sources;
  }

  double timed(const std::function<void()>& work, bool touched) {
    CHECK_CUDA(cudaMemsetAsync(flush_, 0x5a, kFlushBytes, stream_));
    if (touched) {
      touch_kernel<<<1, 1024, 0, stream_>>>(buffers_, kLayers, wrong_);
      touch_kernel<<<1, 1024, 0, stream_>>>(to_buffers_, kLayers, wrong_);
      touch_kernel<<<1, 1024, 0, stream_>>>(offsets_, host_offsets_.size(), wrong_);
      CHECK_CUDA(cudaGetLastError());
    }
    CHECK_CUDA(cudaEventRecord(events_[0], stream_));
    work();
    CHECK_CUDA(cudaEventRecord(events_[1], stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    return elapsed_us(events_[0], events_[1]);
  }

  void report(const Case& c, const char* what, std::uint64_t bytes, bool verified,
              const std::function<void()>& ours, const char* baseline_name,
              const std::function<void()>& baseline) {
    std::vector<double> us;
    std::vector<double> baseline_us;
    const int repeats = quick_ ? 3 : c.repeats;
    for (int i = 0; i < repeats; ++i) {
      us.push_back(timed(ours, c.touched));
      baseline_us.push_back(timed(baseline, c.touched));
    }
    print(c, what, bytes, us, baseline_us, baseline_name, verified);
  }

  void print(const Case& c, const char* what, std::uint64_t bytes, std::vector<double>& us,
             std::vector<double>& baseline_us, const char* baseline_name, bool verified) {
    const Times mine = summarize(us);
    const Times theirs = summarize(baseline_us);
    const double bytes_per_second = static_cast<double>(bytes) / mine.p50_us * 1e6;
    std::printf(
        "{\"bench\":\"%s_%s\",\"params\":\"%s\",\"bytes\":%llu,\"iterations\":%d,\"p50_ns\":%.0f,"
        "\"p99_ns\":%.0f,\"bytes_per_second\":%.4g,\"gb_per_s_per_sm\":%.1f,\"baseline\":\"%s\","
        "\"baseline_p50_ns\":%.0f,\"ratio\":%.4f,\"verified\":%s,%s}\n",
        c.bench, what, c.params.c_str(), static_cast<unsigned long long>(bytes),
        static_cast<int>(us.size()), mine.p50_us * 1000, mine.p99_us * 1000, bytes_per_second,
        c.max_sms == 0 ? 0 : bytes_per_second / 1e9 / c.max_sms, baseline_name,
        theirs.p50_us * 1000, theirs.p50_us / mine.p50_us, verified ? "true" : "false",
        env_.c_str());
    std::fflush(stdout);
  }

  void read_environment() {
    cudaDeviceProp device{};
    int driver = 0;
    CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
    CHECK_CUDA(cudaDriverGetVersion(&driver));
    const char* const commit = std::getenv("KVSHARD_COMMIT");
    char text[512];
    std::snprintf(
        text, sizeof text,
        "\"env\":{\"commit\":\"%s\",\"compiler\":\"nvcc %d.%d\",\"cuda\":%d,\"driver\":%d,"
        "\"gpu\":\"%s\",\"sms\":%d}",
        commit != nullptr ? commit : "unknown", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__,
        CUDART_VERSION, driver, device.name, device.multiProcessorCount);
    env_ = text;
  }

  bool quick_;
  std::string only_;
  bool bulk_{false};
  bool all_verified_{true};
  bool ran_{false};
  std::string env_;
  cudaStream_t stream_{nullptr};
  cudaEvent_t events_[2]{};
  std::uint64_t pool_bytes_{0};
  std::byte* pool_{nullptr};
  std::byte* other_{nullptr};
  std::byte* slot_{nullptr};
  std::byte* flush_{nullptr};
  unsigned long long* wrong_{nullptr};
  std::uint64_t* sums_{nullptr};
  kernels::SlotFound* found_{nullptr};
  std::uint64_t* buffers_{nullptr};
  std::uint64_t* to_buffers_{nullptr};
  std::uint64_t* offsets_{nullptr};
  std::vector<std::uint64_t> host_buffers_;
  std::vector<std::uint64_t> host_to_buffers_;
  std::vector<std::uint64_t> host_offsets_;
  kernels::Fragments fragments_{};
};

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const int named_at = quick ? 2 : 1;
  Bench bench{quick, argc > named_at ? argv[named_at] : ""};
  const std::vector<std::uint64_t> sizes =
      quick ? std::vector{32 * kMiB} : std::vector{2048 * kMiB, 64 * kMiB};
  const auto named = [](std::uint64_t bytes, std::uint64_t fragment) {
    return "payload=" + std::to_string(bytes / kMiB) +
           " MiB, fragment=" + std::to_string(fragment) + " B";
  };
  for (const std::uint64_t bytes : sizes)
    for (const std::uint64_t fragment : {1 * kKiB, 2 * kKiB, 4 * kKiB, 16 * kKiB, 72 * kKiB}) {
      const int repeats = bytes > 100 * kMiB ? 11 : 31;
      const FragmentShape shape{.row_bytes = fragment};
      bench.slots({"slot", named(bytes, fragment), bytes, shape, fragment, 0, false, repeats});
      bench.pull({"page", named(bytes, fragment), bytes, shape, fragment, 0, false, repeats});
      if (bytes > 100 * kMiB) continue;
      const std::string touched = named(bytes, fragment) + ", descriptors cached";
      bench.slots({"slot", touched, bytes, shape, fragment, 0, false, repeats, true});
      bench.pull({"page", touched, bytes, shape, fragment, 0, false, repeats, true});
    }
  // What the order of the pages in memory costs: random ones are above.
  for (const std::uint64_t fragment : {4 * kKiB, 16 * kKiB})
    for (const bool adjacent : {false, true}) {
      const Bench::Case c{
          .bench = adjacent ? "adjacent" : "ascending",
          .params = named(sizes[0], fragment),
          .payload_bytes = sizes[0],
          .shape = {.row_bytes = fragment},
          .page_bytes = fragment,
          .repeats = 11,
          .pages = adjacent ? Bench::Case::Pages::adjacent : Bench::Case::Pages::ascending};
      bench.slots(c);
      bench.pull(c);
    }
  // A pool of which the request is a small part, as a server's is.
  for (const std::uint64_t fragment : {4 * kKiB, 16 * kKiB, 72 * kKiB}) {
    const Bench::Case c{.bench = "wide",
                        .params = named(sizes[0], fragment) + ", in a pool of " +
                                  std::to_string(bench.pool_mib()) + " MiB",
                        .payload_bytes = sizes[0],
                        .shape = {.row_bytes = fragment},
                        .page_bytes = fragment,
                        .repeats = 11,
                        .pages = Bench::Case::Pages::wide};
    bench.slots(c);
    bench.pull(c);
  }
  // Many requests' chunks in one launch.
  for (const std::uint64_t bytes : sizes) {
    const Bench::Case c{.bench = "pieces",
                        .params = named(bytes, 4 * kKiB) + ", 16 pieces",
                        .payload_bytes = bytes,
                        .shape = {.row_bytes = 4 * kKiB},
                        .page_bytes = 4 * kKiB,
                        .repeats = 11,
                        .pieces = 16};
    bench.slots(c);
    bench.pull(c);
  }
  for (const std::uint64_t bytes : sizes)
    bench.slots(
        {"checksum", named(bytes, 16 * kKiB), bytes, {.row_bytes = 16 * kKiB}, 16 * kKiB, 0, true});
  // One of 8 heads of Llama-3 70B pages of 16 tokens, as decode ranks of TP 8 take them from TP 1.
  for (const std::uint64_t bytes : sizes)
    bench.slots({"head_slice",
                 "llama-3 70b tp1 to tp8, 16 tokens, rows of 256 B",
                 bytes / 4,
                 {.outer = 16, .outer_stride = 2048, .row_bytes = 256},
                 32 * kKiB});
  // What a decode rank takes of a page of 16 tokens: a quarter of the heads, or every other token.
  for (const std::uint64_t bytes : sizes)
    for (const std::uint64_t row : {64, 128, 256, 512, 1024})
      for (const bool tokens : {false, true}) {
        const FragmentShape shape{
            .outer = tokens ? 8U : 16U, .outer_stride = (tokens ? 2 : 4) * row, .row_bytes = row};
        bench.strided({tokens ? "every_other_token" : "quarter_of_heads",
                       named(bytes / 4, row) + " rows", bytes / 4, shape,
                       shape.outer * shape.outer_stride});
      }
  for (const std::uint32_t sms : {1U, 2U, 4U, 8U, 16U})
    for (const std::uint64_t fragment : {4 * kKiB, 16 * kKiB, 72 * kKiB}) {
      const std::uint64_t bytes = sms * 32 * kMiB;
      const std::string params = named(bytes, fragment) + ", sms=" + std::to_string(sms);
      bench.slots({"capped", params, bytes, {.row_bytes = fragment}, fragment, sms, false, 5});
      bench.pull({"capped", params, bytes, {.row_bytes = fragment}, fragment, sms, false, 5});
      if (sms == 2 && fragment == 16 * kKiB)
        bench.slots(
            {"capped_checksum", params, bytes, {.row_bytes = fragment}, fragment, sms, true, 5});
    }
  // Pages of real models: bytes of one page, one layer and one of K and V (MLA: both).
  const std::pair<const char*, std::uint64_t> models[] = {
      {"llama-3 70b tp1, 16 tokens", 32 * kKiB},  {"llama-3 70b tp8, 16 tokens", 4 * kKiB},
      {"llama-3 70b tp8, 64 tokens", 16 * kKiB},  {"deepseek mla, 16 tokens", 18 * kKiB},
      {"deepseek mla, 64 tokens", 72 * kKiB},     {"qwen3-30b-a3b tp1, 16 tokens", 16 * kKiB},
      {"qwen3-30b-a3b tp1, 64 tokens", 64 * kKiB}};
  for (const auto& [name, page] : models)
    bench.per_page({"model",
                    std::string{name} + ", 64 MiB",
                    64 * kMiB,
                    {.row_bytes = page},
                    page,
                    0,
                    false,
                    3});
  for (const std::uint64_t page : {1 * kKiB, 2 * kKiB, 4 * kKiB, 16 * kKiB, 72 * kKiB})
    bench.per_page(
        {"page", named(64 * kMiB, page), 64 * kMiB, {.row_bytes = page}, page, 0, false, 3});
  bench.engine_latency();
  for (const std::uint32_t jobs : {8U, 32U, 128U}) bench.engine_stream(sizes[0], jobs);
  bench.beside_decode();
  if (!bench.ran()) {
    std::fprintf(stderr, "no benchmark is called '%s'\n", argv[named_at]);
    return 2;
  }
  return bench.all_verified() ? 0 : 1;
}
