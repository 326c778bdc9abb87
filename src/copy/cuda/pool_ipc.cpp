#include "copy/cuda/pool_ipc.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/try.hpp"
#include "copy/cuda/cuda_handles.hpp"

namespace kvshard {
namespace {

static_assert(sizeof(PoolBlob::Allocation::handle) == sizeof(cudaIpcMemHandle_t));
static_assert(sizeof(PoolBlob::device_uuid) == sizeof(cudaUUID_t));

Error unsupported(std::string message) {
  return {ErrorCode::unsupported, std::move(message)};
}

// What the driver alone can say about an allocation. Found at run time, so that nothing links libcuda, which
// a machine without a GPU lacks.
struct Driver {
  PFN_cuMemGetAddressRange_v3020 address_range{nullptr};
  PFN_cuPointerGetAttribute_v4000 pointer_attribute{nullptr};

  static Result<Driver> find() {
    Driver driver;
    KVSHARD_TRY(find("cuMemGetAddressRange", 3020, driver.address_range));
    KVSHARD_TRY(find("cuPointerGetAttribute", 4000, driver.pointer_attribute));
    return driver;
  }

  // The allocation that holds `pointer`.
  Result<std::pair<CUdeviceptr, std::size_t>> range(const void* pointer) const {
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    const CUresult result = address_range(&base, &bytes, reinterpret_cast<CUdeviceptr>(pointer));
    if (result != CUDA_SUCCESS)
      return unsupported(
          fmt::format("cuMemGetAddressRange({}): error {}", pointer, static_cast<int>(result)));
    return std::pair{base, bytes};
  }
  // False only where the driver says so.
  bool exportable(CUdeviceptr pointer) const noexcept {
    unsigned capable = 1;  // the driver writes a bool into its first byte or an int into all
    const CUresult result =
        pointer_attribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer);
    return result != CUDA_SUCCESS || (capable & 0xffU) != 0;
  }

 private:
  template <typename Function>
  static Status find(const char* name, unsigned version, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#else
    (void)version;
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    KVSHARD_TRY(cuda_status(name, error));
    if (result != cudaDriverEntryPointSuccess || found == nullptr)
      return unsupported(fmt::format("the CUDA driver has no {}", name));
    function = reinterpret_cast<Function>(found);
    return {};
  }
};

std::string_view kind_of(cudaMemoryType type) noexcept {
  switch (type) {
    case cudaMemoryTypeHost:
      return "pinned host";
    case cudaMemoryTypeDevice:
      return "device";
    case cudaMemoryTypeManaged:
      return "managed";
    default:
      return "pageable host";
  }
}

Status check_on_device(const void* buffer, std::size_t number, int device) {
  cudaPointerAttributes attributes{};
  KVSHARD_TRY(
      cuda_status("cudaPointerGetAttributes", cudaPointerGetAttributes(&attributes, buffer)));
  if (attributes.type != cudaMemoryTypeDevice)
    return unsupported(
        fmt::format("pool buffer {} is in {} memory", number, kind_of(attributes.type)));
  if (attributes.device != device)
    return unsupported(fmt::format("pool buffer {} is on CUDA device {}, the pool on {}", number,
                                   attributes.device, device));
  return {};
}

Result<cudaUUID_t> uuid_of(int device) {
  cudaDeviceProp properties{};
  KVSHARD_TRY(cuda_status("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device)));
  return properties.uuid;
}

// The device of that id in this process, or -1: it may be hidden from us and yet be mapped.
int device_of(const std::array<std::byte, 16>& uuid) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  for (int device = 0; device < devices; ++device)
    if (const auto found = uuid_of(device);
        found && std::memcmp(found->bytes, uuid.data(), uuid.size()) == 0)
      return device;
  return -1;
}

Status check_peer_access(int device, int owner) {
  int can = 0;
  KVSHARD_TRY(cuda_status("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can, device, owner)));
  if (can == 0)
    return unsupported(
        fmt::format("CUDA device {} has no peer access to device {} of the pool", device, owner));
  return {};
}

Error open_error(cudaError_t error, std::size_t number, std::size_t count, std::uint64_t bytes) {
  (void)cudaGetLastError();
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorMapBufferObjectFailed:
    case cudaErrorAlreadyMapped:
    case cudaErrorDeviceUninitialized:
    case cudaErrorNotSupported:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorTooManyPeers:
      return unsupported(fmt::format("cudaIpcOpenMemHandle, allocation {} of {}, {} bytes: {} ({})",
                                     number, count, bytes, cudaGetErrorString(error),
                                     cudaGetErrorName(error)));
    default:
      return cuda_error("cudaIpcOpenMemHandle", error);
  }
}

class IpcMappedPool final : public MappedPool {
 public:
  explicit IpcMappedPool(int device) noexcept : device_{device} {}
  ~IpcMappedPool() override {
    const DeviceGuard guard{device_};
    for (void* const base : bases_)
      if (const Status closed = cuda_status("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(base));
          !closed)
        log::warning("mapped pool not closed: {}", closed.error().message);
  }
  IpcMappedPool(const IpcMappedPool&) = delete;
  IpcMappedPool& operator=(const IpcMappedPool&) = delete;

  [[nodiscard]] const Pool& pool() const noexcept override { return pool_; }
  [[nodiscard]] std::string_view description() const noexcept override { return description_; }

  // CUDA counts how often a process has opened a handle, gives the same address each time, and unmaps with
  // the last close.
  Status open(const PoolBlob& blob) {
    bases_.reserve(blob.allocations.size());
    KVSHARD_TRY(const Driver driver, Driver::find());
    for (const PoolBlob::Allocation& allocation : blob.allocations) {
      cudaIpcMemHandle_t handle;
      std::memcpy(&handle, allocation.handle.data(), sizeof handle);
      void* base = nullptr;
      if (const cudaError_t error =
              cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
          error != cudaSuccess)
        return open_error(error, bases_.size(), blob.allocations.size(), allocation.bytes);
      bases_.push_back(base);
      // A kernel that reads past the end takes the whole process's CUDA context with it.
      KVSHARD_TRY(const auto range, driver.range(base));
      const auto at = reinterpret_cast<CUdeviceptr>(base) - range.first;
      if (at > range.second || allocation.bytes > range.second - at)
        return Error{ErrorCode::invalid_argument,
                     fmt::format("pool export: allocation {} has {} bytes, {} are mapped",
                                 bases_.size() - 1, allocation.bytes, range.second - at)};
    }
    return {};
  }
  void place(const PoolBlob& blob, const Geometry& geometry, int owner) {
    pool_.geometry = geometry;
    auto next = blob.buffers.begin();
    for (const BufferGroup& group : geometry.groups) {
      auto& buffers = pool_.buffers.emplace_back();
      for (std::uint32_t i = 0; i < group.buffers(); ++i, ++next)
        buffers.push_back(static_cast<std::byte*>(bases_[next->allocation]) + next->offset);
    }
    std::uint64_t bytes = 0;
    for (const PoolBlob::Allocation& allocation : blob.allocations) bytes += allocation.bytes;
    description_ = fmt::format(
        "by CUDA IPC, {} allocations of {} bytes, on {}, read by device {}", bases_.size(), bytes,
        owner < 0 ? "a device hidden here" : fmt::format("device {}", owner), device_);
  }

 private:
  int device_;
  Pool pool_;
  std::string description_;
  std::vector<void*> bases_;
};

}  // namespace

Result<PoolBlob> describe_cuda_pool(const Pool& pool, int device) {
  KVSHARD_TRY(check_device(device));
  const DeviceGuard guard{device};
  KVSHARD_TRY(const Driver driver, Driver::find());
  PoolBlob blob;
  blob.memory = MemoryKind::cuda;
  KVSHARD_TRY(const cudaUUID_t uuid, uuid_of(device));
  std::memcpy(blob.device_uuid.data(), uuid.bytes, sizeof uuid.bytes);
  std::vector<CUdeviceptr> bases;
  for (const std::vector<std::byte*>& group : pool.buffers)
    for (std::byte* const buffer : group) {
      KVSHARD_TRY(check_on_device(buffer, blob.buffers.size(), device));
      KVSHARD_TRY(const auto range, driver.range(buffer));
      const auto [base, bytes] = range;
      const auto number = static_cast<std::size_t>(std::ranges::find(bases, base) - bases.begin());
      if (number == bases.size()) {
        if (bases.size() > std::numeric_limits<std::uint16_t>::max())
          return unsupported(fmt::format("more than {} allocations", bases.size() - 1));
        if (!driver.exportable(base))
          return unsupported(fmt::format(
              "the allocation of {} bytes that holds pool buffer {} is not exportable by CUDA IPC: "
              "it is of an async pool or the virtual memory API, not of cudaMalloc",
              bytes, blob.buffers.size()));
        cudaIpcMemHandle_t handle;
        if (const cudaError_t error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base));
            error != cudaSuccess) {
          (void)cudaGetLastError();
          return unsupported(fmt::format(
              "cudaIpcGetMemHandle for the {} bytes that hold pool buffer {}: {} ({})", bytes,
              blob.buffers.size(), cudaGetErrorString(error), cudaGetErrorName(error)));
        }
        PoolBlob::Allocation& allocation = blob.allocations.emplace_back();
        std::memcpy(allocation.handle.data(), &handle, sizeof handle);
        allocation.bytes = bytes;
        bases.push_back(base);
      }
      blob.buffers.push_back({.allocation = static_cast<std::uint16_t>(number),
                              .offset = reinterpret_cast<CUdeviceptr>(buffer) - base});
    }
  return blob;
}

Result<std::unique_ptr<MappedPool>> map_cuda_pool(const PoolBlob& blob, const Geometry& geometry,
                                                  int device) {
  KVSHARD_TRY(check_device(device));
  const int owner = device_of(blob.device_uuid);
  if (owner >= 0 && owner != device) KVSHARD_TRY(check_peer_access(device, owner));
  const DeviceGuard guard{device};
  auto mapped = std::make_unique<IpcMappedPool>(device);
  KVSHARD_TRY(mapped->open(blob));
  mapped->place(blob, geometry, owner);
  return std::unique_ptr<MappedPool>{std::move(mapped)};
}

Status allow_peer_access(int device, int owner) {
  KVSHARD_TRY(check_device(device));
  if (device == owner) return {};
  KVSHARD_TRY(check_peer_access(device, owner));
  const DeviceGuard guard{device};
  const cudaError_t error = cudaDeviceEnablePeerAccess(owner, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return {};
  }
  return cuda_status("cudaDeviceEnablePeerAccess", error);
}

}  // namespace kvshard
