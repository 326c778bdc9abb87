#include "kvshard/send_filter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvshard {
namespace {

PageLayout layout_of(std::uint32_t shard_size) {
  return PageLayout::create(shard_size, 16).value();
}

// A chain of `base` whose local pages are random and all different.
std::vector<LogicalPage> random_chain(const PageLayout& layout, std::uint32_t base,
                                      std::size_t pages, std::mt19937& random) {
  std::vector<std::uint32_t> locals(pages + 10);
  for (std::uint32_t i = 0; i < locals.size(); ++i) locals[i] = i + 1;
  std::shuffle(locals.begin(), locals.end(), random);
  std::vector<LogicalPage> chain;
  for (std::size_t k = 0; k < pages; ++k)
    chain.push_back(layout.logical(layout.owner_after(base, k), LocalPage{locals[k]}));
  return chain;
}

using PageRun = Run;  // testing::Test has a Run() of its own

struct Sent {
  std::uint32_t page;
  std::uint32_t position;
  friend bool operator==(const Sent&, const Sent&) = default;
};

// What a rank must send, by the definition: ownership is read from the page id.
std::vector<Sent> expected(std::span<const LogicalPage> chunk, std::uint32_t first,
                           std::uint32_t rank, const PageLayout& layout) {
  std::vector<Sent> sent;
  for (std::uint32_t k = 0; k < chunk.size(); ++k)
    if (index(chunk[k]) % layout.shard_size() == rank)
      sent.push_back({index(chunk[k]) / layout.shard_size(), first + k});
  return sent;
}

std::vector<Sent> listed(const OwnedPages& owned) {
  std::vector<Sent> sent;
  for (std::uint32_t i = 0; i < owned.pages.size(); ++i)
    sent.push_back({index(owned.pages[i]), index(owned.position(i))});
  return sent;
}

TEST(SendFilterTest, RefusesARankThatIsNotThere) {
  EXPECT_TRUE(SendFilter::create(layout_of(2), 1));
  EXPECT_EQ(SendFilter::create(layout_of(2), 2).error().code, ErrorCode::invalid_argument);
}

// acceptance 2: the chain starts at rank 3. A filter by position would give rank 0 positions 0, 4,
// ...
TEST(SendFilterTest, ReadsOwnersFromPageIdsOfARotatedChain) {
  const auto layout = layout_of(4);
  const std::vector<LogicalPage> chain{LogicalPage{7},  LogicalPage{40}, LogicalPage{21},
                                       LogicalPage{30}, LogicalPage{11}, LogicalPage{8}};
  std::vector<LocalPage> out(chain.size());
  const auto owned = SendFilter::create(layout, 0).value().select(chain, Position{0}, out).value();
  EXPECT_EQ(listed(owned), (std::vector<Sent>{{10, 1}, {2, 5}}));
  EXPECT_EQ(owned.positions, (PageRun{1, 4, 2}));
  EXPECT_EQ(owned.base, 3U);
}

// acceptance 3: with K not a multiple of N some ranks own a page less; nothing beyond the prompt is
// sent.
TEST(SendFilterTest, SendsNothingBeyondThePrompt) {
  const auto layout = layout_of(8);
  std::mt19937 random{3};
  const auto table = random_chain(layout, 5, 24, random);  // a page table with room for 24 pages
  const std::span<const LogicalPage> prompt{table.data(), 19};
  std::size_t total = 0;
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    std::vector<LocalPage> out(3);
    const auto owned =
        SendFilter::create(layout, rank).value().select(prompt, Position{0}, out).value();
    EXPECT_EQ(listed(owned), expected(prompt, 0, rank, layout));
    for (const auto& sent : listed(owned)) EXPECT_LT(sent.position, 19U);
    total += owned.pages.size();
  }
  EXPECT_EQ(total, 19U);
}

TEST(SendFilterTest, OwningNothingIsASuccess) {
  const auto filter = SendFilter::create(layout_of(4), 2).value();
  const std::vector<LogicalPage> chunk{LogicalPage{8}, LogicalPage{5}};
  const auto owned = filter.select(chunk, Position{6}, {}).value();
  EXPECT_TRUE(owned.pages.empty());
  EXPECT_EQ(owned.positions.count, 0U);
  EXPECT_EQ(owned.base, 2U);
  EXPECT_TRUE(filter.select({}, Position{6}, {}).value().pages.empty());
}

// acceptance 9: offered to send.
TEST(SendFilterTest, RefusesAChainThatIsNotCyclicOnEveryRank) {
  const auto layout = layout_of(4);
  const std::vector<LogicalPage> chunk{LogicalPage{4}, LogicalPage{5}, LogicalPage{7},
                                       LogicalPage{6}};
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    std::vector<LocalPage> out(4);
    const auto owned = SendFilter::create(layout, rank).value().select(chunk, Position{10}, out);
    ASSERT_FALSE(owned) << rank;
    EXPECT_EQ(owned.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(owned.error().message.find("page 7 at position 12"), std::string::npos);
  }
}

TEST(SendFilterTest, RefusesToWriteBeyondTheOutput) {
  const auto filter = SendFilter::create(layout_of(2), 0).value();
  const std::vector<LogicalPage> chunk{LogicalPage{2}, LogicalPage{3}, LogicalPage{4}};
  std::vector<LocalPage> out{LocalPage{99}};
  const auto owned = filter.select(chunk, Position{0}, out);
  ASSERT_FALSE(owned);
  EXPECT_EQ(owned.error().message, "rank 0 owns 2 of 3 pages, room for 1");
  EXPECT_EQ(out[0], LocalPage{99});
  EXPECT_FALSE(filter.select(chunk, Position{0xffff'fffeU}, out));
}

TEST(SendFilterPropertyTest, AgreesWithTheDefinitionForEveryChunk) {
  std::mt19937 random{5};
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    const auto layout = layout_of(shard_size);
    for (const std::size_t pages : {1, 2, 3, 7, 8, 9, 16, 17, 40, 129, 1000})
      for (std::uint32_t base = 0; base < shard_size; ++base) {
        const auto chain = random_chain(layout, base, pages, random);
        for (std::uint32_t rank = 0; rank < shard_size; ++rank) {
          const auto filter = SendFilter::create(layout, rank).value();
          std::vector<Sent> sent;
          for (std::size_t at = 0; at < pages;) {  // ragged chunks
            const auto size = std::min<std::size_t>(1 + random() % 50, pages - at);
            const auto chunk = std::span{chain}.subspan(at, size);
            std::vector<LocalPage> out(filter.capacity(size));
            const auto owned = filter.select(chunk, Position{static_cast<std::uint32_t>(at)}, out);
            ASSERT_TRUE(owned) << owned.error().message;
            ASSERT_EQ(owned->base, base);
            ASSERT_EQ(owned->positions.count, owned->pages.size());
            const auto part = listed(*owned);
            sent.insert(sent.end(), part.begin(), part.end());
            at += size;
          }
          ASSERT_EQ(sent, expected(chain, 0, rank, layout));
        }
      }
  }
}

std::vector<PageRun> runs_of(const std::vector<std::uint32_t>& numbers) {
  std::vector<LocalPage> pages;
  for (const auto n : numbers) pages.push_back(LocalPage{n});
  std::vector<PageRun> runs(numbers.size());
  runs.resize(to_runs(pages, runs));
  return runs;
}

TEST(RunsTest, CompressesAscendingSteps) {
  EXPECT_EQ(runs_of({}), (std::vector<PageRun>{}));
  EXPECT_EQ(runs_of({7}), (std::vector<PageRun>{{7, 1, 1}}));
  EXPECT_EQ(runs_of({1, 2, 3}), (std::vector<PageRun>{{1, 1, 3}}));
  EXPECT_EQ(runs_of({1, 5, 9, 10, 11}), (std::vector<PageRun>{{1, 4, 3}, {10, 1, 2}}));
  EXPECT_EQ(runs_of({5, 5, 4}), (std::vector<PageRun>{{5, 1, 1}, {5, 1, 1}, {4, 1, 1}}));
}

TEST(RunsTest, TellsHowManyRunsItNeeded) {
  const std::vector<Position> positions{Position{9}, Position{3}, Position{1}};
  std::vector<PageRun> runs(1);
  EXPECT_EQ(to_runs(positions, runs), 3U);
  EXPECT_EQ(runs[0], (PageRun{9, 1, 1}));
}

TEST(RunsPropertyTest, ExpandToTheNumbersTheyCameFrom) {
  std::mt19937 random{9};
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::uint32_t> numbers(random() % 40);
    for (auto& n : numbers) n = static_cast<std::uint32_t>(random() % 6);
    std::vector<std::uint32_t> expanded;
    for (const auto& run : runs_of(numbers))
      for (std::uint32_t i = 0; i < run.count; ++i) expanded.push_back(run.first + i * run.stride);
    ASSERT_EQ(expanded, numbers);
  }
}

}  // namespace
}  // namespace kvshard
