// What a profiler sees of a range. The CUDA engine makes one around each launch.
#include <gtest/gtest.h>

#include <cstdlib>

#include "copy/cuda/nvtx.hpp"

namespace kvshard {
namespace {

TEST(NvtxTest, AToolSeesNameDomainAndBytes) {
  ASSERT_EQ(::setenv("NVTX_INJECTION64_PATH", KVSHARD_NVTX_INJECTION, 1), 0);
  ::testing::internal::CaptureStdout();
  {
    const NvtxRange outer{"gather", 4'096};
    const NvtxRange inner{"scatter", 17};
  }
  EXPECT_EQ(
      ::testing::internal::GetCapturedStdout(),
      "domain kvshard\npush gather 4096 in its domain\npush scatter 17 in its domain\npop\npop\n");
}

}  // namespace
}  // namespace kvshard
