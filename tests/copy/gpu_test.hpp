#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace kvshard::test {

/// Why this machine cannot run CUDA; none when it can.
inline std::optional<std::string> no_device() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return std::nullopt;
  return std::string{"no CUDA device: "} + cudaGetErrorString(error);
}

/// Without a GPU a test is skipped, and fails where KVSHARD_REQUIRE_GPU=1 says that there is one.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto reason = no_device();
    if (!reason) return SetUpOnGpu();
    const char* const required = std::getenv("KVSHARD_REQUIRE_GPU");
    if (required != nullptr && std::string{required} == "1") FAIL() << *reason;
    GTEST_SKIP() << *reason;
  }
  virtual void SetUpOnGpu() {}
};

}  // namespace kvshard::test

#define ASSERT_CUDA(call) ASSERT_EQ(cudaSuccess, (call))
#define EXPECT_CUDA(call) EXPECT_EQ(cudaSuccess, (call))
