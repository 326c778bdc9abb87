#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "kvshard/result.hpp"

// One move-only class per CUDA handle, each with an empty state. The device must be current when one is
// made; none needs it to be destroyed.
namespace kvshard {

/// `what` failed with `error`: resource_exhausted for memory, else internal.
inline Error cuda_error(const char* what, cudaError_t error) {
  return {error == cudaErrorMemoryAllocation ? ErrorCode::resource_exhausted : ErrorCode::internal,
          fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

/// Success, or cuda_error(). Clears our own failure, so that the engine's next check does not find it.
inline Status cuda_status(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return cuda_error(what, error);
}

/// unsupported where there is no such device.
inline Status check_device(int device) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    return Error{ErrorCode::unsupported,
                 fmt::format("no CUDA device: {}", cudaGetErrorString(error))};
  }
  if (device < 0 || device >= devices)
    return Error{ErrorCode::unsupported, fmt::format("CUDA device {} of {}", device, devices)};
  return {};
}

/// Makes a device current, and the one before it current again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) noexcept {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    if (before_ == device)
      before_ = -1;
    else
      (void)cudaSetDevice(device);
  }
  ~DeviceGuard() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_{-1};
};

/// Owns what Destroy frees.
template <typename Handle, cudaError_t (*Destroy)(Handle)>
class CudaHandle {
 public:
  CudaHandle() noexcept = default;
  explicit CudaHandle(Handle handle) noexcept : handle_{handle} {}
  ~CudaHandle() { reset(); }
  CudaHandle(CudaHandle&& other) noexcept : handle_{other.release()} {}
  CudaHandle& operator=(CudaHandle&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = other.release();
    }
    return *this;
  }
  CudaHandle(const CudaHandle&) = delete;
  CudaHandle& operator=(const CudaHandle&) = delete;

  [[nodiscard]] Handle get() const noexcept { return handle_; }
  [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, Handle{}); }
  explicit operator bool() const noexcept { return handle_ != Handle{}; }
  void reset() noexcept {
    if (handle_ != Handle{}) (void)Destroy(release());
  }

 private:
  Handle handle_{};
};

using CudaStream = CudaHandle<cudaStream_t, cudaStreamDestroy>;
using CudaEvent = CudaHandle<cudaEvent_t, cudaEventDestroy>;
using DeviceBuffer = CudaHandle<void*, cudaFree>;
using PinnedBuffer = CudaHandle<void*, cudaFreeHost>;

inline Result<DeviceBuffer> make_device_buffer(std::size_t bytes) {
  void* memory = nullptr;
  if (Status status = cuda_status("cudaMalloc", cudaMalloc(&memory, bytes)); !status)
    return Error{status.error().code, fmt::format("{}, {} bytes", status.error().message, bytes)};
  return DeviceBuffer{memory};
}

inline Result<PinnedBuffer> make_pinned_buffer(std::size_t bytes) {
  void* memory = nullptr;
  if (Status status = cuda_status("cudaMallocHost", cudaMallocHost(&memory, bytes)); !status)
    return Error{status.error().code, fmt::format("{}, {} bytes", status.error().message, bytes)};
  return PinnedBuffer{memory};
}

}  // namespace kvshard
