#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "wire/samples.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvshard::wire {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{file}, {}};
}

const fs::path& corpus() {
  static const fs::path path{KVSHARD_FUZZ_CORPUS_DIR};
  return path;
}

// acceptance 42
TEST(WireFuzzTest, CorpusReplays) {
  std::size_t replayed = 0;
  for (const auto& entry : fs::directory_iterator{corpus()}) {
    const std::string input = read_file(entry.path());
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
    ++replayed;
  }
  EXPECT_GT(replayed, 0U) << corpus();
}

// The fuzzer starts from valid messages. KVSHARD_UPDATE_CORPUS=1 writes them anew.
TEST(WireFuzzTest, CorpusHoldsEveryMessage) {
  const bool update = std::getenv("KVSHARD_UPDATE_CORPUS") != nullptr;
  for_each_sample([&](const char* name, const auto& message) {
    const auto frame = frame_of(message);
    const std::string bytes{reinterpret_cast<const char*>(frame.data()), frame.size()};
    const fs::path path = corpus() / (std::string{name} + ".bin");
    if (update) std::ofstream{path, std::ios::binary} << bytes;
    EXPECT_EQ(read_file(path), bytes) << path;
  });
}

}  // namespace
}  // namespace kvshard::wire
