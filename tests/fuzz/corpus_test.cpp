#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

// acceptance 42: what the fuzzers found, and where they start from, in every build.
TEST(FuzzTest, CorpusReplays) {
  std::size_t replayed = 0;
  for (const auto& entry : std::filesystem::directory_iterator{KVSHARD_FUZZ_CORPUS_DIR}) {
    std::ifstream file{entry.path(), std::ios::binary};
    const std::string input{std::istreambuf_iterator<char>{file}, {}};
    SCOPED_TRACE(entry.path());
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
    ++replayed;
  }
  EXPECT_GT(replayed, 0U);
}

// Inputs that no file holds.
TEST(FuzzTest, NothingAndNoiseAreInputsToo) {
  LLVMFuzzerTestOneInput(nullptr, 0);
  std::string noise(4096, '\0');
  std::uint32_t state = 1;
  for (std::size_t size = 1; size <= noise.size(); size *= 2) {
    for (char& byte : noise) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<char>(state >> 24);
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(noise.data()), size);
  }
}

}  // namespace
