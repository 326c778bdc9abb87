#include <fmt/format.h>

#include "base/try.hpp"
#include "copy/host/host_copy_engine.hpp"
#include "copy/pool_blob.hpp"
#include "copy/pool_exports.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/pool_mapping.hpp"
#ifdef KVSHARD_HAVE_CUDA
#include "copy/cuda/cuda_copy_engine.hpp"
#include "copy/cuda/pool_ipc.hpp"
#endif

// The one place that knows which copy engines this build has, and so which pools can be mapped.
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

Result<std::unique_ptr<PoolExport>> export_pool(const Pool& pool, MemoryKind memory,
                                                [[maybe_unused]] int cuda_device) {
  KVSHARD_TRY(validate(pool));
  switch (memory) {
    case MemoryKind::host:
      return publish_export({}, {pool, -1});
    case MemoryKind::cuda: {
#ifdef KVSHARD_HAVE_CUDA
      KVSHARD_TRY(auto blob, describe_cuda_pool(pool, cuda_device));
      return publish_export(std::move(blob), {pool, cuda_device});
#else
      return no_cuda();
#endif
    }
  }
  return Error{ErrorCode::invalid_argument, "unknown kind of memory"};
}

Result<std::unique_ptr<MappedPool>> map_pool(std::span<const std::byte> bytes,
                                             const Geometry& geometry, MemoryKind memory,
                                             [[maybe_unused]] int cuda_device) {
  KVSHARD_TRY(validate(geometry));
  KVSHARD_TRY(const PoolBlob blob, decode_pool_blob(bytes));
  KVSHARD_TRY(const ProcessIdentity self, this_process());
  KVSHARD_TRY(check_same_host(blob.process, self));
  if (blob.memory != memory)
    return Error{ErrorCode::unsupported, blob.memory == MemoryKind::host
                                             ? "the pool is in host memory, ours in CUDA memory"
                                             : "the pool is in CUDA memory, ours in host memory"};
  if (blob.process == self) {
    KVSHARD_TRY(LocalPool local, find_export(blob.export_id, geometry));
#ifdef KVSHARD_HAVE_CUDA
    if (memory == MemoryKind::cuda) KVSHARD_TRY(allow_peer_access(cuda_device, local.cuda_device));
#endif
    return std::make_unique<UnmappedPool>(std::move(local.pool));
  }
  if (memory == MemoryKind::host)
    return Error{
        ErrorCode::unsupported,
        fmt::format("the pool is in host memory of process {}, which cannot be mapped here",
                    blob.process.pid)};
  KVSHARD_TRY(check_holds(blob, geometry));
#ifdef KVSHARD_HAVE_CUDA
  return map_cuda_pool(blob, geometry, cuda_device);
#else
  return no_cuda();
#endif
}

}  // namespace kvshard
