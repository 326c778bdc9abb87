// The demo as a user runs it: a registry, N prefill ranks and a decode rank as processes, over UCX.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace kvshard::test {
namespace {

struct Outcome {
  int exit_code{-1};
  std::string output;
};

Outcome run_demo(const std::string& options) {
  const std::string command = std::string{KVSHARD_DEMO_TOOL} + " " + options + " 2>&1";
  Outcome outcome;
  FILE* const pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  for (std::size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    outcome.output.append(buffer.data(), got);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return outcome;
}

// acceptance 46: both trained variants, N = 1, 2, 4.
TEST(DemoTest, SplitRunsRepeatTheUnsplitOneBitForBit) {
  const Outcome demo = run_demo("--prompts 3 --count 16");
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
  EXPECT_NE(demo.output.find("PASS"), std::string::npos) << demo.output;
  for (const char* row : {"grouped (GQA)  1", "grouped (GQA)  2", "grouped (GQA)  4",
                          "latent (MLA)   1", "latent (MLA)   2", "latent (MLA)   4"}) {
    EXPECT_NE(demo.output.find(row), std::string::npos) << row << " is missing in\n" << demo.output;
  }
}

// acceptance 46: somebody else's model.
TEST(DemoTest, RunsALlama2CheckpointSplit) {
  const char* const shared = std::getenv("KVSHARD_SHARED_DIR");
  const std::filesystem::path model =
      std::filesystem::path{shared != nullptr ? shared : ""} / "models/stories260K.bin";
  if (!std::filesystem::exists(model)) GTEST_SKIP() << model << " is not here";
  const Outcome demo = run_demo("--prompts 2 --model " + model.string());
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
}

// The check itself: one damaged page of one prompt is seen.
TEST(DemoTest, OneDamagedPageFailsTheDemo) {
  const Outcome demo = run_demo("--prompts 2 --shards 2 --damage");
  EXPECT_EQ(demo.exit_code, 1) << demo.output;
  EXPECT_NE(demo.output.find("FAIL: a split run differs"), std::string::npos) << demo.output;
  EXPECT_NE(demo.output.find("1 differ"), std::string::npos) << demo.output;
}

TEST(DemoTest, APromptThatCanNeverFitIsRefusedAtIntake) {
  const Outcome demo = run_demo("--prompts 1 --shards 2 --pool-pages 8");
  EXPECT_EQ(demo.exit_code, 1) << demo.output;
  EXPECT_NE(demo.output.find("normal"), std::string::npos) << demo.output;
}

}  // namespace
}  // namespace kvshard::test
