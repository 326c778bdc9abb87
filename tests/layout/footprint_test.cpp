#include "kvshard/footprint.hpp"

#include <gtest/gtest.h>

namespace kvshard {
namespace {

PageLayout layout_of(std::uint32_t shard_size, std::uint32_t page_size) {
  return PageLayout::create(shard_size, page_size).value();
}

TEST(FootprintTest, ShardingDividesThePoolAndAddsScratch) {
  const auto bytes = footprint(layout_of(4, 64), {100'000, 4096, 512, 1000}).value();
  // 1563 pages: 391 on a rank, and one of padding.
  EXPECT_EQ(bytes.sharded, (RankFootprint{392, 392 * 4096, 2 * 512 * 1000}));
  EXPECT_EQ(bytes.unsharded, (RankFootprint{1564, 1564 * 4096, 0}));
  EXPECT_EQ(bytes.sharded.total_bytes(), 392U * 4096 + 2 * 512 * 1000);
}

TEST(FootprintTest, AGroupOfOneNeedsNoScratch) {
  const auto bytes = footprint(layout_of(1, 16), {160, 100, 512, 1000}).value();
  EXPECT_EQ(bytes.sharded, bytes.unsharded);
  EXPECT_EQ(bytes.sharded, (RankFootprint{11, 1100, 0}));
}

TEST(FootprintTest, NoTokensStillNeedThePaddingPage) {
  const auto bytes = footprint(layout_of(8, 16), {0, 100, 0, 0}).value();
  EXPECT_EQ(bytes.sharded.pool_bytes, 100U);
}

TEST(FootprintTest, RefusesSizesBeyond64Bits) {
  const std::uint64_t huge = std::uint64_t{1} << 63;
  const auto layout = layout_of(2, 1);
  EXPECT_EQ(footprint(layout, {huge, 2, 0, 0}).error().code, ErrorCode::invalid_argument);
  EXPECT_FALSE(footprint(layout, {0, 1, huge, 1}));
  EXPECT_FALSE(footprint(layout, {0, 1, huge, 2}));
  EXPECT_FALSE(footprint(layout, {0, huge, huge / 2, 1}));
  EXPECT_FALSE(footprint(layout, {~std::uint64_t{0}, 0, 0, 0}));
}

TEST(FootprintPropertyTest, ARankHoldsAtLeastItsShare) {
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    for (const std::uint32_t page_size : {1, 2, 16, 64, 128})
      for (std::uint64_t tokens = 0; tokens < 700; ++tokens) {
        const auto bytes = footprint(layout_of(shard_size, page_size), {tokens, 10, 0, 0}).value();
        const auto usable = bytes.sharded.pages - 1;
        ASSERT_GE(usable * shard_size * page_size, tokens);
        ASSERT_LT(usable * shard_size * page_size, tokens + std::uint64_t{shard_size} * page_size);
        ASSERT_EQ(bytes.sharded.pool_bytes, bytes.sharded.pages * 10);
      }
}

}  // namespace
}  // namespace kvshard
