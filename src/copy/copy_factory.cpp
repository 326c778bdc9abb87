#include "copy/host/host_copy_engine.hpp"
#include "kvshard/copy_engine.hpp"
#ifdef KVSHARD_HAVE_CUDA
#include "copy/cuda/cuda_copy_engine.hpp"
#endif

// The one place that knows which copy engines this build has.
namespace kvshard {
namespace {

[[maybe_unused]] Error no_cuda() {
  return Error{ErrorCode::unsupported, "this build of kvshard has no CUDA"};
}

}  // namespace

Result<std::unique_ptr<CopyEngine>> make_copy_engine(const CopyEngineOptions& options) {
  switch (options.memory) {
    case MemoryKind::host:
      return std::make_unique<HostCopyEngine>(options.host_threads);
    case MemoryKind::cuda:
#ifdef KVSHARD_HAVE_CUDA
      return CudaCopyEngine::create(options);
#else
      return no_cuda();
#endif
  }
  return Error{ErrorCode::invalid_argument, "unknown kind of memory"};
}

Result<std::unique_ptr<StagingMemory>> make_staging_memory(MemoryKind kind,
                                                           [[maybe_unused]] int cuda_device,
                                                           std::size_t bytes) {
  switch (kind) {
    case MemoryKind::host:
      return HostStagingMemory::create(bytes);
    case MemoryKind::cuda:
#ifdef KVSHARD_HAVE_CUDA
      return CudaStagingMemory::create(cuda_device, bytes);
#else
      return no_cuda();
#endif
  }
  return Error{ErrorCode::invalid_argument, "unknown kind of memory"};
}

}  // namespace kvshard
