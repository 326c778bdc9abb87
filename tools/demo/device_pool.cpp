#include "demo/device_pool.hpp"

#include "base/try.hpp"

#ifdef KVSHARD_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace demo {

using namespace kvshard;

namespace {

#ifdef KVSHARD_HAVE_CUDA
Status copy(void* to, const void* from, std::size_t bytes) {
  cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
  // From pageable memory that returns before the last bytes have landed, and the ranks' streams do not wait
  // for it.
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
  if (error == cudaSuccess) return {};
  return Error{ErrorCode::internal, std::string{"cudaMemcpy: "} + cudaGetErrorString(error)};
}
#else
Status copy(void*, const void*, std::size_t) {
  return Error{ErrorCode::unsupported, "this build has no CUDA"};
}
#endif

}  // namespace

Result<std::unique_ptr<DevicePool>> DevicePool::create(tiny_llm::KvPool& host) {
  const std::size_t bytes =
      host.shape().buffers() * host.page_floats() * host.page_count() * sizeof(float);
  KVSHARD_TRY(auto memory, make_staging_memory(MemoryKind::cuda, 0, bytes));
  return std::unique_ptr<DevicePool>{new DevicePool{host, std::move(memory)}};
}

std::byte* DevicePool::page(std::size_t buffer, LocalPage page) const {
  const std::size_t page_bytes = host_.page_floats() * sizeof(float);
  return memory_->bytes().data() + (buffer * host_.page_count() + index(page)) * page_bytes;
}

Pool DevicePool::describe(std::string model_id) const {
  Pool pool = host_.describe(std::move(model_id));
  for (std::size_t b = 0; b < pool.buffers[0].size(); ++b)
    pool.buffers[0][b] = page(b, LocalPage{0});
  return pool;
}

Status DevicePool::upload(std::span<const LocalPage> pages) {
  for (const LocalPage local : pages) {
    for (std::size_t b = 0; b < host_.shape().buffers(); ++b) {
      const std::span<const float> from = std::as_const(host_).page(b, local);
      KVSHARD_TRY(copy(page(b, local), from.data(), from.size_bytes()));
    }
  }
  return {};
}

Status DevicePool::download(std::span<const LocalPage> pages) {
  for (const LocalPage local : pages) {
    for (std::size_t b = 0; b < host_.shape().buffers(); ++b) {
      const std::span<float> to = host_.page(b, local);
      KVSHARD_TRY(copy(to.data(), page(b, local), to.size_bytes()));
    }
  }
  return {};
}

}  // namespace demo
