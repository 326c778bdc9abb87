#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "copy/gpu_test.hpp"
#include "kernels/slot_copy.hpp"
#include "support/copy_plans.hpp"

// The launchers by themselves: what they refuse, and capture in a graph. What they copy is the business of the
// conformance suite.
namespace kvshard::test {
namespace {

class SlotCopyKernelsTest : public GpuTest {
 protected:
  void SetUpOnGpu() override {
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    stream_ = CudaStream{stream};
  }

  template <typename T>
  T* upload(const std::vector<T>& values) {
    buffers_.push_back(make_device_buffer(values.size() * sizeof(T)).value());
    EXPECT_EQ(cudaSuccess, cudaMemcpy(buffers_.back().get(), values.data(),
                                      values.size() * sizeof(T), cudaMemcpyHostToDevice));
    EXPECT_EQ(cudaSuccess, cudaDeviceSynchronize());  // pageable memory: the copy may still run
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

TEST_F(SlotCopyKernelsTest, RefusesAPullBeyondASide) {
  const kernels::Fragments side{.buffers = nullptr,
                                .offsets = nullptr,
                                .buffer_count = 1,
                                .offset_count = 2,
                                .outer = 1,
                                .inner = 1,
                                .outer_stride = 0,
                                .inner_stride = 0,
                                .row_bytes = 16};
  const kernels::PullPiece good{
      .from = side, .to = side, .from_offset = 0, .to_offset = 0, .bytes = 0};
  const auto launch = [&](const kernels::PullPiece& piece, std::uint32_t unit_bytes) {
    return kernels::launch_pull({.pieces = &piece,
                                 .piece_count = 1,
                                 .unit_bytes = unit_bytes,
                                 .max_sms = 0,
                                 .bulk_copies = false},
                                stream_.get());
  };
  EXPECT_EQ(launch(good, 16), cudaSuccess);  // an empty grid is an error to CUDA only
  kernels::PullPiece bad = good;
  bad.bytes = 48;
  EXPECT_EQ(launch(bad, 16), cudaErrorInvalidValue);
  bad.bytes = 32;
  bad.to_offset = 16;
  EXPECT_EQ(launch(bad, 16), cudaErrorInvalidValue);
  bad.to_offset = 0;
  bad.from_offset = 48;
  EXPECT_EQ(launch(bad, 16), cudaErrorInvalidValue);
  bad.from_offset = 0;
  EXPECT_EQ(launch(bad, 3), cudaErrorInvalidValue);
  EXPECT_EQ(launch(bad, 0), cudaErrorInvalidValue);
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
    ASSERT_CUDA(cudaDeviceSynchronize());
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
