#include "session/cuda_pages.hpp"

namespace kvshard::test {
namespace {

constexpr std::uint32_t kThreads = 128;

__device__ std::uint64_t content_word(const DevicePages& pages, std::uint32_t position,
                                      std::uint32_t buffer, std::uint64_t word) {
  std::uint64_t x = pages.request * 0x9e3779b97f4a7c15U ^ pages.generation * 0xc2b2ae3d27d4eb4fU ^
                    (std::uint64_t{position} << 32 | buffer) * 0x165667b19e3779f9U ^
                    (word + 1) * 0xd6e8feb86659fd93U;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93U;
  x ^= x >> 29;
  return x;
}

__device__ std::uint64_t* page_of(const DevicePages& pages, std::uint32_t page,
                                  std::uint32_t buffer) {
  return reinterpret_cast<std::uint64_t*>(pages.memory + buffer * pages.buffer_stride +
                                          pages.pages[page] * pages.page_bytes);
}

// One block for each page and buffer.
__global__ void fill_kernel(const DevicePages pages) {
  std::uint64_t* const words = page_of(pages, blockIdx.x, blockIdx.y);
  for (std::uint64_t i = threadIdx.x; i < pages.page_bytes / 8; i += kThreads)
    words[i] = content_word(pages, pages.positions[blockIdx.x], blockIdx.y, i);
}

__global__ void check_kernel(const DevicePages pages, std::uint64_t* wrong) {
  const std::uint64_t* const words = page_of(pages, blockIdx.x, blockIdx.y);
  for (std::uint64_t i = threadIdx.x; i < pages.page_bytes / 8; i += kThreads)
    if (words[i] != content_word(pages, pages.positions[blockIdx.x], blockIdx.y, i))
      atomicAdd(reinterpret_cast<unsigned long long*>(wrong), 1ULL);
}

__global__ void delay_kernel(std::uint64_t nanoseconds) {
  const auto now = [] {
    std::uint64_t time = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  };
  for (const std::uint64_t start = now(); now() - start < nanoseconds;) __nanosleep(1000);
}

}  // namespace

cudaError_t launch_fill(const DevicePages& pages, cudaStream_t stream) noexcept {
  if (pages.count == 0) return cudaSuccess;
  fill_kernel<<<dim3{pages.count, pages.buffers}, kThreads, 0, stream>>>(pages);
  return cudaGetLastError();
}

cudaError_t launch_check(const DevicePages& pages, std::uint64_t* wrong,
                         cudaStream_t stream) noexcept {
  if (pages.count == 0) return cudaSuccess;
  check_kernel<<<dim3{pages.count, pages.buffers}, kThreads, 0, stream>>>(pages, wrong);
  return cudaGetLastError();
}

cudaError_t launch_delay(std::chrono::nanoseconds time, cudaStream_t stream) noexcept {
  delay_kernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(time.count()));
  return cudaGetLastError();
}

}  // namespace kvshard::test
