#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "wire/samples.hpp"

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

// The fuzzer starts from valid messages. KVSHARD_UPDATE_CORPUS=1 writes them anew.
TEST(WireCorpusTest, CorpusHoldsEveryMessage) {
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
