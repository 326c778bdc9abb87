#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "kernels/slot_copy.hpp"
#include "support/copy_plans.hpp"

// The launchers by themselves: the pull, which no engine uses yet, and capture in a graph. What gather and
// scatter copy is the business of the conformance suite.
namespace kvshard::test {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(cudaSuccess, (call))

class SlotCopyKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      const char* const required = std::getenv("KVSHARD_REQUIRE_GPU");
      const std::string reason = std::string{"no CUDA device: "} + cudaGetErrorString(error);
      if (required != nullptr && std::string{required} == "1") FAIL() << reason;
      GTEST_SKIP() << reason;
    }
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    stream_ = CudaStream{stream};
  }

  template <typename T>
  T* upload(const std::vector<T>& values) {
    buffers_.push_back(make_device_buffer(values.size() * sizeof(T)).value());
    EXPECT_EQ(cudaSuccess, cudaMemcpy(buffers_.back().get(), values.data(),
                                      values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(buffers_.back().get());
  }
  static std::vector<std::byte> random_bytes(std::size_t bytes, std::mt19937_64& random) {
    std::vector<std::byte> made(bytes);
    for (std::byte& byte : made) byte = static_cast<std::byte>(random());
    return made;
  }
  static std::vector<std::byte> download(const std::byte* from, std::size_t bytes) {
    std::vector<std::byte> made(bytes);
    EXPECT_EQ(cudaSuccess, cudaMemcpy(made.data(), from, bytes, cudaMemcpyDeviceToHost));
    return made;
  }
  kernels::Fragments fragments(const BatchPlan& plan, const std::byte* pool) {
    std::vector<std::uint64_t> addresses;
    for (const std::uint64_t at : plan.buffers)
      addresses.push_back(reinterpret_cast<std::uintptr_t>(pool) + at);
    return {.buffers = upload(addresses),
            .offsets = upload(plan.offsets),
            .buffer_count = static_cast<std::uint32_t>(plan.buffers.size()),
            .offset_count = static_cast<std::uint32_t>(plan.offsets.size()),
            .outer = plan.shape.outer,
            .inner = plan.shape.inner,
            .outer_stride = plan.shape.outer_stride,
            .inner_stride = plan.shape.inner_stride,
            .row_bytes = plan.shape.row_bytes};
  }

  CudaStream stream_;
  std::vector<DeviceBuffer> buffers_;
};

TEST_F(SlotCopyKernelsTest, PullsFromPageToPageHoweverEachSideIsCut) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random{seed};
    const std::uint64_t unit = std::uint64_t{1} << random_in(random, 0, 4);
    // The same rows on both sides, held together here and apart there.
    const auto rows = static_cast<std::uint32_t>(random_in(random, 1, 12));
    const std::uint64_t row_bytes = unit * random_in(random, 1, 70);
    const FragmentShape packed{.outer = 1,
                               .outer_stride = 0,
                               .inner = 1,
                               .inner_stride = 0,
                               .row_bytes = rows * row_bytes};
    const FragmentShape apart{.outer = rows,
                              .outer_stride = row_bytes + unit * 3,
                              .inner = 1,
                              .inner_stride = 0,
                              .row_bytes = row_bytes};
    const std::size_t buffers = random_in(random, 1, 5);
    const std::size_t pages = random_in(random, 1, 9);
    std::uint64_t from_bytes = 0;
    std::uint64_t to_bytes = 0;
    const BatchPlan from = place_batch(random, packed, buffers, pages, unit, from_bytes);
    const BatchPlan to = place_batch(random, apart, buffers, pages, unit, to_bytes);
    const std::vector<std::byte> source = random_bytes(from_bytes, random);
    std::vector<std::byte> expected = random_bytes(to_bytes, random);
    const std::byte* const from_pool = upload(source);
    std::byte* const to_pool = upload(expected);

    std::vector<std::byte> slot;
    JobPlan{{from}, nullptr}.for_each_byte(
        [&](std::uint64_t at, std::uint64_t) { slot.push_back(source[at]); });
    JobPlan{{to}, nullptr}.for_each_byte(
        [&](std::uint64_t at, std::uint64_t payload) { expected[at] = slot[payload]; });
    const kernels::PullArgs args{.from = fragments(from, from_pool),
                                 .to = fragments(to, to_pool),
                                 .unit_bytes = static_cast<std::uint32_t>(unit),
                                 .max_sms = seed % 3 == 0 ? 1U : 0U};
    ASSERT_CUDA(kernels::launch_pull(args, stream_.get()));
    ASSERT_CUDA(cudaStreamSynchronize(stream_.get()));
    ASSERT_EQ(download(to_pool, to_bytes), expected);
    ASSERT_EQ(download(from_pool, from_bytes), source);
  }
}

TEST_F(SlotCopyKernelsTest, RefusesAPullOfUnequalSides) {
  const kernels::Fragments one{.buffers = nullptr,
                               .offsets = nullptr,
                               .buffer_count = 1,
                               .offset_count = 1,
                               .outer = 1,
                               .inner = 1,
                               .outer_stride = 0,
                               .inner_stride = 0,
                               .row_bytes = 16};
  kernels::Fragments two = one;
  two.offset_count = 2;
  EXPECT_EQ(
      kernels::launch_pull({.from = one, .to = two, .unit_bytes = 16, .max_sms = 0}, stream_.get()),
      cudaErrorInvalidValue);
  EXPECT_EQ(
      kernels::launch_pull({.from = one, .to = one, .unit_bytes = 3, .max_sms = 0}, stream_.get()),
      cudaErrorInvalidValue);
}

TEST_F(SlotCopyKernelsTest, AGraphReplaysGatherAndScatter) {
  std::mt19937_64 random{1};
  constexpr std::uint64_t kPool = 32 * 1024;
  const BatchPlan plan{
      .buffers = {0, kPool / 2}, .offsets = {8192, 0, 12288}, .shape = {.row_bytes = 4096}};
  std::vector<std::byte> source = random_bytes(kPool, random);
  std::byte* const from_pool = upload(source);
  const std::uint64_t payload = JobPlan{{plan}, nullptr}.bytes();
  std::byte* const slot = upload(std::vector<std::byte>(slot_bytes_for(payload)));
  std::uint64_t* const sums = upload(std::vector<std::uint64_t>(kernels::kChecksumSums));
  kernels::SlotFound* const found = upload(std::vector<kernels::SlotFound>(1));

  const kernels::Slot slots[] = {{.address = slot,
                                  .lease = 1,
                                  .generation = 2,
                                  .chunk = 3,
                                  .payload_bytes = payload,
                                  .sums = sums,
                                  .found = found}};
  const kernels::SlotPiece piece{
      .fragments = fragments(plan, from_pool), .slot = 0, .payload_offset = 0};
  const kernels::SlotCopyArgs args{.pieces = &piece,
                                   .piece_count = 1,
                                   .slots = slots,
                                   .slot_count = 1,
                                   .unit_bytes = 16,
                                   .max_sms = 0,
                                   .bulk_copies = false};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal));
  ASSERT_CUDA(kernels::launch_gather(args, stream_.get()));
  ASSERT_CUDA(kernels::launch_scatter(args, stream_.get()));
  ASSERT_CUDA(cudaStreamEndCapture(stream_.get(), &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int round = 0; round < 3; ++round) {
    source = random_bytes(kPool, random);
    ASSERT_CUDA(cudaMemcpy(from_pool, source.data(), kPool, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaGraphLaunch(executable, stream_.get()));
    ASSERT_CUDA(cudaStreamSynchronize(stream_.get()));
    const std::vector<std::byte> bytes = download(slot, slot_bytes_for(payload));
    JobPlan{{plan}, nullptr}.for_each_byte([&](std::uint64_t at, std::uint64_t to) {
      ASSERT_EQ(bytes[kSlotHeaderBytes + to], source[at]);
    });
    kernels::SlotFound marks;
    ASSERT_CUDA(cudaMemcpy(&marks, found, sizeof marks, cudaMemcpyDeviceToHost));
    EXPECT_EQ(marks.header[1], 2u);
    EXPECT_EQ(marks.trailer[4], marks.checksum);
    EXPECT_EQ(marks.checksum, oracle_checksum(std::span{bytes}.subspan(kSlotHeaderBytes, payload)));
  }
  EXPECT_EQ(download(from_pool, kPool), source);  // the scatter put back what the gather took
  ASSERT_CUDA(cudaGraphExecDestroy(executable));
  ASSERT_CUDA(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace kvshard::test
