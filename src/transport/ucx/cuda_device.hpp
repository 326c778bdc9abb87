#pragma once

#include "kvshard/result.hpp"

#ifdef KVSHARD_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "base/log.hpp"
#endif

// UCX acts on the calling thread's current CUDA device.
namespace kvshard::ucx {

#ifdef KVSHARD_HAVE_CUDA

/// Makes a device current for a scope, and puts the one before back. -1 changes nothing.
class DeviceGuard {
 public:
  static Result<DeviceGuard> enter(int device) {
    DeviceGuard guard;
    if (device < 0) return guard;
    int before = -1;
    auto error = cudaGetDevice(&before);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    // Registering memory needs the context, not only the choice of a device.
    if (error == cudaSuccess) error = cudaFree(nullptr);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return Error{ErrorCode::unsupported,
                   fmt::format("CUDA device {}: {}", device, cudaGetErrorString(error))};
    }
    guard.before_ = before;
    return guard;
  }
  DeviceGuard(DeviceGuard&& other) noexcept : before_{std::exchange(other.before_, -1)} {}
  DeviceGuard& operator=(DeviceGuard&&) = delete;
  ~DeviceGuard() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }

 private:
  DeviceGuard() = default;
  int before_{-1};
};

/// For a thread of our own. create() has already shown that the device works.
inline void set_device(int device) noexcept {
  if (const auto error = cudaSetDevice(device); error != cudaSuccess)
    log::error("cudaSetDevice({}): {}", device, cudaGetErrorString(error));
}

#else

class DeviceGuard {
 public:
  static Result<DeviceGuard> enter(int device) {
    if (device >= 0) return Error{ErrorCode::unsupported, "this build of kvshard has no CUDA"};
    return DeviceGuard{};
  }
  DeviceGuard() = default;
  DeviceGuard(DeviceGuard&&) = default;
  ~DeviceGuard() {}  // not trivial, so that an unused guard is no warning
};
inline void set_device(int) noexcept {}

#endif

}  // namespace kvshard::ucx
