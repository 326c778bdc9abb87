#include "bench/device.hpp"

#include <cstring>

#ifdef KVSHARD_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace kvshard::bench {

#ifdef KVSHARD_HAVE_CUDA

namespace {
Status check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return Error{ErrorCode::unsupported, std::string{what} + ": " + cudaGetErrorString(error)};
}
}  // namespace

Status use_device(int device) {
  return device < 0 ? Status{} : check("cudaSetDevice", cudaSetDevice(device));
}

Status fill_bytes(MemoryKind kind, void* at, int value, std::size_t bytes) {
  if (kind == MemoryKind::host) {
    std::memset(at, value, bytes);
    return {};
  }
  const Status filled = check("cudaMemset", cudaMemset(at, value, bytes));
  return filled ? check("cudaDeviceSynchronize", cudaDeviceSynchronize()) : filled;
}

Status copy_bytes(MemoryKind kind, void* to, const void* from, std::size_t bytes) {
  if (kind == MemoryKind::host) {
    std::memcpy(to, from, bytes);
    return {};
  }
  const Status copied = check("cudaMemcpy", cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  // From device to device cudaMemcpy() does not wait for the end.
  return copied ? check("cudaDeviceSynchronize", cudaDeviceSynchronize()) : copied;
}

std::string cuda_version() {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) return "unknown";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string gpu_name(int device) {
  cudaDeviceProp properties{};
  if (device < 0 || cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "none";
  return properties.name;
}

#else

Status use_device(int device) {
  if (device < 0) return {};
  return Error{ErrorCode::unsupported, "this build has no CUDA"};
}

Status fill_bytes(MemoryKind kind, void* at, int value, std::size_t bytes) {
  if (kind == MemoryKind::cuda) return Error{ErrorCode::unsupported, "this build has no CUDA"};
  std::memset(at, value, bytes);
  return {};
}

Status copy_bytes(MemoryKind kind, void* to, const void* from, std::size_t bytes) {
  if (kind == MemoryKind::cuda) return Error{ErrorCode::unsupported, "this build has no CUDA"};
  std::memcpy(to, from, bytes);
  return {};
}

std::string cuda_version() {
  return "none";
}
std::string gpu_name(int) {
  return "none";
}

#endif

}  // namespace kvshard::bench
