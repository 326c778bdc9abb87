// The demo as a user runs it: a registry, N prefill ranks and T decode ranks as processes, over UCX.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/run_command.hpp"

namespace kvshard::test {
namespace {

Outcome run_demo(const std::string& options) {
  return run_command(std::string{KVSHARD_DEMO_TOOL} + " " + options + " 2>&1");
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

TEST(DemoTest, OneTraceHoldsTheRanksOfAllRuns) {
  const std::filesystem::path file = std::filesystem::path{::testing::TempDir()} /
                                     ("kvshard_demo_trace." + std::to_string(::getpid()));
  const Outcome demo = run_demo("--prompts 1 --shards 2 --decode-tp 1 --trace " + file.string());
  EXPECT_EQ(demo.exit_code, 0) << demo.output;
  const auto trace = nlohmann::json::parse(std::ifstream{file}, nullptr, false);
  std::filesystem::remove(file);
  ASSERT_TRUE(trace.is_object());
  std::map<std::string, int> spans;  // by rank and stage
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "M" && event["ph"] != "e")
      ++spans[event["args"]["rank"].get<std::string>() + " " + event["name"].get<std::string>()];
  }
  for (const char* each : {"prefill 0 gather", "prefill 1 gather", "prefill 1 lease", "decode wire",
                           "decode scatter", "decode pull"}) {
    EXPECT_GT(spans[each], 0) << each;
  }
  EXPECT_EQ(spans["prefill 0 gather"] + spans["prefill 1 gather"], spans["decode wire"]);
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
