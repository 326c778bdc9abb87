#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

// Kernels that write and read the pages of a pool, as an engine's do.
namespace kvshard::test {

inline constexpr std::uint32_t kMaxPagesAtOnce = 32;

/// Pages that hold some positions of a content, byte by byte as content_byte() says (patterned_pool.hpp).
/// Units: bytes, multiples of 8.
struct DevicePages {
  std::byte* memory{nullptr};      // device; of buffer 0
  std::uint64_t buffer_stride{0};  // from one buffer to the next
  std::uint64_t page_bytes{0};     // of a page in one buffer; pages are packed
  std::uint32_t buffers{0};
  std::uint32_t count{0};
  std::uint32_t pages[kMaxPagesAtOnce]{};
  std::uint32_t positions[kMaxPagesAtOnce]{};
  std::uint64_t request{0}, generation{0};
};

/// Enqueues the writing of the pages.
cudaError_t launch_fill(const DevicePages& pages, cudaStream_t stream) noexcept;
/// Enqueues a reader, which adds to `wrong` (device) how many 8-byte words are not the content's.
cudaError_t launch_check(const DevicePages& pages, std::uint64_t* wrong,
                         cudaStream_t stream) noexcept;
/// Enqueues a kernel that only takes its time.
cudaError_t launch_delay(std::chrono::nanoseconds time, cudaStream_t stream) noexcept;

}  // namespace kvshard::test
