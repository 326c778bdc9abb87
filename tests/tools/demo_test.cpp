// The demo as a user runs it: a registry, N prefill ranks and T decode ranks as processes, over UCX.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

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

// acceptance 46: both trained variants, N = 1, 2, 4. T = 1, 2 are, with real tokens, acceptance 11 for head
// slices of page shards and acceptance 12 for latent KV that every decode rank pulls whole.
TEST(DemoTest, SplitRunsRepeatTheUnsplitOneBitForBit) {
  const Outcome demo = run_demo("--prompts 3 --count 16");
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
  EXPECT_NE(demo.output.find("PASS"), std::string::npos) << demo.output;
  for (const char* variant : {"grouped (GQA) ", "latent (MLA)  "}) {
    for (const char* ranks : {" 1  1 ", " 1  2 ", " 2  1 ", " 2  2 ", " 4  1 ", " 4  2 "}) {
      const std::string row = std::string{variant} + ranks;
      EXPECT_NE(demo.output.find(row), std::string::npos) << row << " is missing in\n"
                                                          << demo.output;
    }
  }
}

// Two decode ranks move the bytes of one: each pulls its heads and no others.
TEST(DemoTest, DecodeRanksPullOnlyTheirHeads) {
  const Outcome demo =
      run_demo("--prompts 2 --count 4 --shards 4 --model " TINY_LLM_MODELS_DIR "/grouped.bin");
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
  std::vector<std::string> moved;
  for (std::size_t at = 0; (at = demo.output.find(" MB ", at)) != std::string::npos; ++at) {
    const std::size_t begin = demo.output.rfind(' ', at - 1) + 1;
    moved.push_back(demo.output.substr(begin, at - begin));
  }
  ASSERT_GE(moved.size(), 2U) << demo.output;
  EXPECT_EQ(moved[0], moved[1]) << demo.output;
}

TEST(DemoTest, RanksThatDoNotDivideTheHeadsAreRefused) {
  const Outcome demo = run_demo("--prompts 1 --shards 1 --decode-tp 3");
  EXPECT_EQ(demo.exit_code, 1) << demo.output;
  EXPECT_NE(demo.output.find("3 ranks do not divide 4 KV heads"), std::string::npos) << demo.output;
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

// The check itself: one damaged page of one prompt is seen, also in one of two decode ranks.
TEST(DemoTest, OneDamagedPageFailsTheDemo) {
  for (const char* decode_tp : {"1", "2"}) {
    const Outcome demo =
        run_demo(std::string{"--prompts 2 --shards 2 --damage --decode-tp "} + decode_tp);
    EXPECT_EQ(demo.exit_code, 1) << demo.output;
    EXPECT_NE(demo.output.find("FAIL: a split run differs"), std::string::npos) << demo.output;
    EXPECT_NE(demo.output.find("1 differ"), std::string::npos) << demo.output;
  }
}

TEST(DemoTest, APromptThatCanNeverFitIsRefusedAtIntake) {
  const Outcome demo = run_demo("--prompts 1 --shards 2 --pool-pages 8");
  EXPECT_EQ(demo.exit_code, 1) << demo.output;
  EXPECT_NE(demo.output.find("normal"), std::string::npos) << demo.output;
}

}  // namespace
}  // namespace kvshard::test
