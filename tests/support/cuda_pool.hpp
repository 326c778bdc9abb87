#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvshard/geometry.hpp"
#include "session/cuda_pages.hpp"
#include "support/patterned_pool.hpp"

namespace kvshard::test {

/// gtest reports it as the test's failure; in another process it ends the process.
inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error{std::string{"CUDA: "} + cudaGetErrorString(error)};
}

/// Device memory for a pool: one allocation, full of canaries. A host pool of the same geometry is its image.
class CudaPool {
 public:
  enum class Memory { plain, async };  // cudaMalloc; cudaMallocAsync, which cannot be exported

  explicit CudaPool(Geometry geometry, Memory memory = Memory::plain)
      : pool_{std::move(geometry), {}}, kind_{memory} {
    std::vector<std::size_t> starts;
    for (const BufferGroup& group : pool_.geometry.groups) {
      for (std::uint32_t b = 0; b < group.buffers(); ++b) {
        starts.push_back(bytes_);
        bytes_ += (buffer_bytes(group) + 255) / 256 * 256;
      }
    }
    void* made = nullptr;
    must(kind_ == Memory::plain ? cudaMalloc(&made, bytes_)
                                : cudaMallocAsync(&made, bytes_, nullptr));
    memory_ = static_cast<std::byte*>(made);
    auto start = starts.begin();
    for (const BufferGroup& group : pool_.geometry.groups) {
      auto& buffers = pool_.buffers.emplace_back();
      for (std::uint32_t b = 0; b < group.buffers(); ++b) buffers.push_back(memory_ + *start++);
    }
    wipe();
  }
  ~CudaPool() {
    (void)(kind_ == Memory::plain ? cudaFree(memory_) : cudaFreeAsync(memory_, nullptr));
  }
  CudaPool(const CudaPool&) = delete;
  CudaPool& operator=(const CudaPool&) = delete;

  [[nodiscard]] const Pool& pool() const { return pool_; }

  void wipe() {
    must(cudaMemset(memory_, static_cast<int>(kCanary), bytes_));
    must(cudaDeviceSynchronize());
  }
  void upload(const Pool& from) { copy(pool_, from, cudaMemcpyHostToDevice); }
  void download(const Pool& to) { copy(to, pool_, cudaMemcpyDeviceToHost); }

  /// Some pages of the only group, for a kernel: `pages[i]` is position first_position + i * step.
  [[nodiscard]] DevicePages select(std::span<const LocalPage> pages, std::uint32_t first_position,
                                   std::uint32_t step, const Content& content) const {
    if (pages.size() > kMaxPagesAtOnce) throw std::length_error{"too many pages for one kernel"};
    const BufferGroup& group = pool_.geometry.groups.at(0);
    DevicePages made{.memory = memory_,
                     .buffer_stride = (buffer_bytes(group) + 255) / 256 * 256,
                     .page_bytes = group.page_bytes(),
                     .buffers = group.buffers(),
                     .count = static_cast<std::uint32_t>(pages.size()),
                     .request = content.request,
                     .generation = content.generation};
    for (std::uint32_t i = 0; i < made.count; ++i) {
      made.pages[i] = index(pages[i]);
      made.positions[i] = first_position + i * step;
    }
    return made;
  }

 private:
  static std::size_t buffer_bytes(const BufferGroup& group) {
    return (group.page_stride != 0 ? group.page_stride : group.page_bytes()) * group.page_count;
  }
  void copy(const Pool& to, const Pool& from, cudaMemcpyKind kind) const {
    for (std::size_t g = 0; g < pool_.buffers.size(); ++g)
      for (std::size_t b = 0; b < pool_.buffers[g].size(); ++b)
        must(cudaMemcpy(to.buffers[g][b], from.buffers[g][b],
                        buffer_bytes(pool_.geometry.groups[g]), kind));
    must(cudaDeviceSynchronize());  // the engines' streams do not wait for the default one
  }

  Pool pool_;
  Memory kind_;
  std::byte* memory_{nullptr};
  std::size_t bytes_{0};
};

}  // namespace kvshard::test
