// kvshard-bench as a user runs it, small; and the parts of it that other parts rely on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/pool.hpp"
#include "bench/prefix_cache.hpp"
#include "bench/trace.hpp"
#include "bench/workload.hpp"
#include "support/run_command.hpp"
#include "trace/summary.hpp"

namespace kvshard::bench {
namespace {

using Json = nlohmann::json;

struct Outcome : test::Outcome {
  [[nodiscard]] Json json() const { return Json::parse(output, nullptr, false); }
};

Outcome run_bench(const std::string& options) {
  return {test::run_command(std::string{KVSHARD_BENCH_TOOL} + " " + options)};
}

// A file of this test, gone afterwards.
class TestFile {
 public:
  explicit TestFile(const std::string& text) {
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path{::testing::TempDir()} /
            (std::string{"kvshard_bench_"} + test->name() + ".jsonl");
    std::ofstream{path_} << text;
  }
  ~TestFile() { std::filesystem::remove(path_); }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// Requests of a few families with a common beginning each, of all lengths from a token to six blocks.
std::string synthetic_trace(std::size_t requests) {
  std::string text;
  std::uint32_t next_id = 1000;
  for (std::size_t i = 0; i < requests; ++i) {
    const std::size_t family = i * 7 % 5;
    const std::size_t tokens = 1 + i * 397 % (6 * kBlockTokens);
    Json ids = Json::array();
    for (std::size_t b = 0; b < (tokens + kBlockTokens - 1) / kBlockTokens; ++b)
      ids.push_back(b < family ? family * 10 + b : next_id++);
    text +=
        Json{{"timestamp", i}, {"input_length", tokens}, {"output_length", 1}, {"hash_ids", ids}}
            .dump() +
        "\n";
  }
  return text;
}

TEST(BenchTest, PullsBetweenProcessesAreVerifiedAndComparedWithBaselines) {
  const Outcome bench = run_bench(
      "pull --model qwen3-30b-a3b --layers 2 --tokens 100 --prefill 2 --decode-tp 2 --concurrency "
      "2 "
      "--chunk-tokens 32 --slot-bytes 64KiB --repeat 2 --warmup 1 --page-operations 16");
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const Json result = bench.json();
  ASSERT_TRUE(result.is_object()) << bench.output;
  // 2 requests of 7 pages of 16 tokens, 2 layers, K and V, 4 heads of 256 bytes over both ranks.
  EXPECT_EQ(result["bytes"], 2 * 7 * 16 * 2 * 2 * 4 * 256);
  EXPECT_EQ(result["verified"], true);
  EXPECT_EQ(result["iterations"], 2);
  EXPECT_EQ(result["pulls_by_path"]["am"], 2 * 2 * 2);  // rounds, ranks, requests
  EXPECT_EQ(result["sources"].size(), 2U);
  for (const char* name : {"bare", "memcpy", "pages"})
    EXPECT_GT(result["baselines"][name]["ratio"].get<double>(), 0.0) << name;
  EXPECT_EQ(result["baselines"]["pages"]["extrapolated"], true);
  for (const char* field : {"commit", "compiler", "cuda", "ucx", "gpu", "cpu"})
    EXPECT_TRUE(result["env"].contains(field)) << field;
}

TEST(BenchTest, OnePageGivesLatenciesAndATrace) {
  const TestFile trace{""};
  const Outcome bench = run_bench(
      "pull --model deepseek-v3 --layers 2 --one-page --prefill 2 --repeat 5 --no-baselines "
      "--trace " +
      trace.path());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const Json result = bench.json();
  EXPECT_EQ(result["bytes"], 2 * 16 * 576 * 2);
  EXPECT_GT(result["request_p50_ns"].get<std::int64_t>(), 0);
  EXPECT_GE(result["request_p99_ns"], result["request_p50_ns"]);
  const auto merged = trace::read_traces({trace.path()});
  ASSERT_TRUE(merged.ok()) << merged.error().message;
  EXPECT_EQ(merged->processes.size(), 3U);
  const trace::Summary summary = trace::summarize(*merged);
  EXPECT_EQ(summary.pulls, 1U + 2 + 5);  // the verified one, warm-up, timed ones
  EXPECT_EQ(summary.bytes, summary.pulls * result["bytes"].get<std::uint64_t>());
}

TEST(BenchTest, SweepChoosesAmongWhatItMeasuredAndDrawsIt) {
  const TestFile picture{""};
  const Outcome bench = run_bench(
      "sweep --layers 2 --tokens 256 --repeat 1 --warmup 0 --no-baselines --slot-bytes "
      "64KiB,256KiB "
      "--slots 1,2 --window 1,2 --svg " +
      picture.path());
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const Json sweep = bench.json();
  EXPECT_EQ(sweep["results"].size(), 6U);  // a window of 2 over 1 slot is left out
  const auto chosen = std::ranges::find_if(sweep["results"], [&](const Json& result) {
    const Json& params = result["params"];
    const Json& choice = sweep["chosen"];
    return params["slot_bytes"] == choice["slot_bytes"] && params["slots"] == choice["slots"] &&
           params["window"] == choice["window"];
  });
  ASSERT_NE(chosen, sweep["results"].end());
  for (const Json& result : sweep["results"])
    EXPECT_GE((*chosen)["bytes_per_second"].get<double>(),
              0.97 * result["bytes_per_second"].get<double>());
  std::ifstream file{picture.path()};
  const std::string svg{std::istreambuf_iterator<char>{file}, {}};
  EXPECT_TRUE(svg.starts_with("<svg ")) << svg.substr(0, 80);
  EXPECT_NE(svg.find("2 slots, window 2"), std::string::npos);
}

// acceptance 47, on a trace that the test makes.
TEST(BenchTest, ReplayIsExactAndNeedsAShareOfThePool) {
  const TestFile trace{synthetic_trace(200)};
  const Outcome bench =
      run_bench("replay " + trace.path() + " --pool-tokens 64000 --in-flight 8 --page-size 16");
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const Json replay = bench.json();
  const Json& sharded = replay["sharded"];
  const Json& unsharded = replay["unsharded"];
  EXPECT_EQ(sharded["requests"], 200);
  EXPECT_EQ(sharded["verified"], true);
  EXPECT_EQ(sharded["bytes"], unsharded["bytes"]);
  EXPECT_GT(sharded["hit_rate"].get<double>(), 0.05);
  EXPECT_GT(sharded["evicted_blocks"].get<std::uint64_t>(), 0U);
  EXPECT_NEAR(sharded["hit_rate"].get<double>(), unsharded["hit_rate"].get<double>(), 0.01);
  EXPECT_NEAR(replay["pool_ratio"].get<double>(), 0.25, 0.01);
  EXPECT_EQ(sharded["peak_pages_by_rank"].size(), 4U);
}

// acceptance 47: the beginning of the recorded one; the whole takes a minute (docs/benchmarks.md).
TEST(BenchTest, ReplaysTheRecordedTrace) {
  const char* const shared = std::getenv("KVSHARD_SHARED_DIR");
  const std::filesystem::path trace =
      std::filesystem::path{shared != nullptr ? shared : ""} / "traces/mooncake_conversation.jsonl";
  if (!std::filesystem::exists(trace)) GTEST_SKIP() << trace << " is not here";
  const Outcome bench = run_bench("replay " + trace.string() + " --limit 300 --layers 1");
  ASSERT_EQ(bench.exit_code, 0) << bench.output;
  const Json replay = bench.json();
  EXPECT_EQ(replay["sharded"]["requests"], 300);
  EXPECT_NEAR(replay["sharded"]["hit_rate"].get<double>(),
              replay["unsharded"]["hit_rate"].get<double>(), 0.001);
  EXPECT_NEAR(replay["pool_ratio"].get<double>(), 0.25, 0.01);
}

TEST(BenchTest, ABadTraceIsRefusedByLineAndField) {
  const std::string good =
      R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]})"
      "\n\n";
  const std::map<std::string, std::string> bad{
      {"{", "line 3: request"},
      {"[1]", "line 3: request"},
      {R"({"input_length": 1, "output_length": 1, "hash_ids": [1]})", "line 3: timestamp: missing"},
      {R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       "line 3: timestamp"},
      {R"({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []})",
       "line 3: input_length"},
      {R"({"timestamp": 0, "input_length": 1e9, "output_length": 1, "hash_ids": []})",
       "line 3: input_length"},
      {R"({"timestamp": 0, "input_length": 1, "hash_ids": [1]})", "line 3: output_length: missing"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1})", "line 3: hash_ids: missing"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]})",
       "line 3: hash_ids: 1 ids, but an input_length of 513 has 2 blocks"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [4294967296]})",
       "line 3: hash_ids: 4294967296 is above 4294967295"},
  };
  for (const auto& [line, message] : bad) {
    std::istringstream text{good + line};
    const auto trace = read_trace(text, 0);
    ASSERT_FALSE(trace.ok()) << line;
    EXPECT_TRUE(trace.error().message.starts_with(message)) << trace.error().message;
  }
  std::istringstream text{good + "{"};
  const auto first = read_trace(text, 1);  // what is behind the limit is not looked at
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->at(0).blocks, (std::vector<std::uint32_t>{1, 2}));
}

PrefixCache make_cache(std::uint32_t pages_per_rank) {
  const PageLayout layout = PageLayout::create(2, 256).value();  // blocks of 2 pages
  return {layout, PageAllocator::create(layout, pages_per_rank).value()};
}
TraceRequest prompt(std::vector<std::uint32_t> blocks, std::uint32_t missing_tokens = 0) {
  return {.input_tokens = static_cast<std::uint32_t>(blocks.size()) * kBlockTokens - missing_tokens,
          .blocks = std::move(blocks)};
}

TEST(PrefixCacheTest, SharesPagesOfEqualPrefixesOnly) {
  PrefixCache cache = make_cache(64);
  const auto first = cache.admit(prompt({1, 2, 3})).value().value();
  const auto second = cache.admit(prompt({1, 2, 4})).value().value();
  const auto other = cache.admit(prompt({9})).value().value();
  const auto longer = cache.admit(prompt({9, 2})).value().value();  // 2 follows 1 so far, not 9
  EXPECT_EQ(first.cached_blocks, 0U);
  EXPECT_EQ(second.cached_blocks, 2U);
  EXPECT_EQ(other.cached_blocks, 0U);
  EXPECT_EQ(longer.cached_blocks, 1U);
  EXPECT_TRUE(std::equal(first.pages.begin(), first.pages.begin() + 4, second.pages.begin()));
  EXPECT_NE(first.pages[4], second.pages[4]);
}

TEST(PrefixCacheTest, DropsTheBlockUsedLongestAgoAndNeverAHeldOne) {
  PrefixCache cache = make_cache(5);  // 10 pages: 4 blocks and a page of each rank in reserve
  const auto held = cache.admit(prompt({1})).value().value();
  const auto old = cache.admit(prompt({2})).value().value();
  const auto recent = cache.admit(prompt({3})).value().value();
  ASSERT_TRUE(cache.release(recent).ok());
  ASSERT_TRUE(cache.release(old).ok());
  const auto again = cache.admit(prompt({2})).value().value();  // now 3 is the oldest
  EXPECT_EQ(again.cached_blocks, 1U);
  ASSERT_TRUE(cache.release(again).ok());
  const auto large = cache.admit(prompt({4, 5})).value().value();
  EXPECT_EQ(cache.evicted(), 1U);
  EXPECT_EQ(cache.admit(prompt({2})).value().value().cached_blocks, 1U);
  // All are held now: there is no place, and nothing has changed.
  EXPECT_FALSE(cache.admit(prompt({6})).value().has_value());
  EXPECT_EQ(cache.admit(prompt({1})).value().value().cached_blocks, 1U);
}

TEST(PrefixCacheTest, GivesEveryPageBack) {
  PrefixCache cache = make_cache(16);
  const auto whole = cache.admit(prompt({1, 2})).value().value();
  const auto part = cache.admit(prompt({1, 3}, 300)).value().value();  // a tail of one page
  EXPECT_EQ(part.private_pages, 1U);
  EXPECT_EQ(cache.allocator().used_pages(), 5U);
  ASSERT_TRUE(cache.release(part).ok());
  EXPECT_EQ(cache.allocator().used_pages(), 4U);
  ASSERT_TRUE(cache.clear().ok());  // held: stays
  EXPECT_EQ(cache.allocator().used_pages(), 4U);
  ASSERT_TRUE(cache.release(whole).ok());
  ASSERT_TRUE(cache.clear().ok());
  EXPECT_EQ(cache.allocator().used_pages(), 0U);
  EXPECT_EQ(cache.admit(prompt(std::vector<std::uint32_t>(17, 1))).error().code,
            ErrorCode::resource_exhausted);
}

// The oracle of all measures: a byte off, or one too many, is seen.
TEST(PatternPoolTest, SeesAWrongByteAndAStrayOne) {
  PullConfig config;
  config.layers = 2;
  config.tokens = 64;
  const auto workload = Workload::create(config).value();
  auto pool = PatternPool::create(workload.decode()[0], MemoryKind::host, -1).value();
  auto content = workload.decode_content();
  ASSERT_TRUE(pool.fill(content).ok());
  ASSERT_TRUE(pool.check(content).ok());
  std::byte& last = pool.bytes().back();
  last ^= std::byte{1};
  EXPECT_EQ(pool.check(content).error().code, ErrorCode::data_loss);
  last ^= std::byte{1};
  std::swap(content[0].content, content[1].content);
  EXPECT_EQ(pool.check(content).error().code, ErrorCode::data_loss);
  std::swap(content[0].content, content[1].content);
  pool.bytes()[3] = std::byte{0};  // padding page
  EXPECT_EQ(pool.check(content).error().code, ErrorCode::data_loss);
}

TEST(WorkloadTest, FragmentationMovesThatShareOfThePages) {
  PullConfig config;
  config.prefill = 2;
  config.tokens = 16 * 1024;
  const auto breaks = [&](double share) {
    config.fragmentation = share;
    const auto workload = Workload::create(config).value();
    EXPECT_TRUE(workload.layout().check_cyclic(workload.source(0)).ok());
    std::size_t count = 0;
    const auto pages = workload.source(0);
    for (std::size_t p = 2; p < pages.size(); ++p)
      count += index(pages[p]) != index(pages[p - 2]) + 2;  // the owner's next page
    return count;
  };
  EXPECT_EQ(breaks(0), 0U);
  EXPECT_GT(breaks(0.25), 200U);
  EXPECT_LT(breaks(0.25), 600U);
  EXPECT_GT(breaks(1), 1000U);
}

}  // namespace
}  // namespace kvshard::bench
