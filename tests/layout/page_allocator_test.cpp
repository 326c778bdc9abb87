#include "kvshard/page_allocator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

namespace kvshard {
namespace {

using Pages = std::vector<LogicalPage>;

PageAllocator allocator_of(std::uint32_t shard_size, std::uint32_t pages_per_rank,
                           FreeOrder order = FreeOrder::last_freed_first) {
  const auto layout = PageLayout::create(shard_size, 16).value();
  return PageAllocator::create(layout, pages_per_rank, order).value();
}

Pages draw(PageAllocator& allocator, std::size_t count) {
  Pages pages(count);
  const auto base = allocator.draw_chain(pages);
  EXPECT_TRUE(base) << base.error().message;
  return pages;
}

Pages pages_of(std::initializer_list<std::uint32_t> numbers) {
  Pages pages;
  for (const auto n : numbers) pages.push_back(LogicalPage{n});
  return pages;
}

// The call must fail with this code, say this, and leave the state as it was.
template <typename Call>
void expect_refused(PageAllocator& allocator, ErrorCode code, const std::string& message,
                    Call call) {
  const auto before = allocator.snapshot();
  const Status status = call();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, code);
  EXPECT_NE(status.error().message.find(message), std::string::npos) << status.error().message;
  EXPECT_EQ(allocator.snapshot(), before);
}

Status drawn(Result<std::uint32_t> result) {
  return result ? Status{} : Status{std::move(result).error()};
}

TEST(PageAllocatorTest, RefusesPoolsThatAreEmptyOrBeyond32Bits) {
  const auto layout = PageLayout::create(4, 16).value();
  EXPECT_EQ(PageAllocator::create(layout, 0).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(PageAllocator::create(layout, 1U << 30).error().code, ErrorCode::invalid_argument);
}

TEST(PageAllocatorTest, ChainsStartAtTheFullestOwnerAndGoOnCyclically) {
  auto allocator = allocator_of(4, 10);
  EXPECT_EQ(draw(allocator, 6), pages_of({4, 5, 6, 7, 8, 9}));  // all equal: rank 0
  EXPECT_EQ(draw(allocator, 3), pages_of({10, 11, 12}));        // ranks 2 and 3 have most: rank 2
  EXPECT_EQ(allocator.draw_chain({}).value(), 1U);              // 7, 8, 8, 8 are left
}

TEST(PageAllocatorTest, ExtensionContinuesTheRotation) {
  auto allocator = allocator_of(3, 10);
  draw(allocator, 1);
  Pages chain(4);
  EXPECT_EQ(allocator.draw_chain(chain).value(), 1U);
  Pages tail(2);
  ASSERT_TRUE(allocator.extend(1, Position{4}, tail));
  chain.insert(chain.end(), tail.begin(), tail.end());
  EXPECT_TRUE(allocator.layout().check_cyclic(chain));
  EXPECT_EQ(allocator.layout().owner(tail[0]), 2U);
}

TEST(PageAllocatorTest, BatchChoosesEachBaseAfterTheDrawsBeforeIt) {
  auto allocator = allocator_of(4, 10);
  Pages one(1);
  Pages two(2);
  Pages three(5);
  const std::vector<DrawSegment> batch{
      {{}, Position{0}, one}, {{}, Position{0}, two}, {{}, Position{0}, three}};
  ASSERT_TRUE(allocator.draw(batch));
  EXPECT_EQ(one, pages_of({4}));
  EXPECT_EQ(two, pages_of({5, 6}));
  EXPECT_EQ(three, pages_of({7, 8, 9, 10, 11}));
}

TEST(PageAllocatorTest, SegmentsOfOneChainMayBeDrawnApart) {
  auto allocator = allocator_of(4, 10);
  Pages head(3);
  Pages tail(4);
  const std::vector<DrawSegment> chain{{2U, Position{0}, head}, {2U, Position{3}, tail}};
  ASSERT_TRUE(allocator.draw(chain));
  Pages whole{head};
  whole.insert(whole.end(), tail.begin(), tail.end());
  EXPECT_EQ(allocator.layout().owner(whole[0]), 2U);
  EXPECT_TRUE(allocator.layout().check_cyclic(whole));
  const std::vector<FreeSegment> pieces{{2, Position{3}, tail}, {2, Position{0}, head}};
  EXPECT_TRUE(allocator.free(pieces));
  EXPECT_EQ(allocator.used_pages(), 0U);
}

// acceptance 7: 10 pages are free, but not at rank 1. The sum would admit what the draw cannot do.
TEST(PageAllocatorTest, ShortageAtOneOwnerRefusesTheDrawWhole) {
  for (const auto order : {FreeOrder::last_freed_first, FreeOrder::ascending}) {
    auto allocator = allocator_of(3, 6, order);
    Pages one(1);
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(allocator.extend(1, Position{0}, one));
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(allocator.extend(0, Position{0}, one));
    EXPECT_EQ(allocator.total_free_pages(), 10U);
    EXPECT_EQ(allocator.admissible_pages(), 0U);
    EXPECT_EQ(allocator.admit(1).error().code, ErrorCode::resource_exhausted);
    EXPECT_NE(allocator.admit(3).error().message.find("rank 1 has 0 free"), std::string::npos);

    Pages pages(3, LogicalPage{77});
    expect_refused(allocator, ErrorCode::resource_exhausted,
                   "rank 1 has 0 free pages, the draw needs 1",
                   [&] { return drawn(allocator.draw_chain(pages)); });
    Pages fits(2, LogicalPage{77});
    const std::vector<DrawSegment> batch{{{}, Position{0}, fits}, {0U, Position{0}, pages}};
    expect_refused(allocator, ErrorCode::resource_exhausted,
                   "rank 1 has 0 free pages, the draw needs 1",
                   [&] { return allocator.draw(batch); });
    expect_refused(allocator, ErrorCode::resource_exhausted,
                   "rank 1 has 0 free pages, the draw needs 1", [&] {
                     return allocator.draw_matching(pages_of({3, 4, 5}), pages);
                   });
    EXPECT_EQ(fits, Pages(2, LogicalPage{77}));
    EXPECT_EQ(pages, Pages(3, LogicalPage{77}));
  }
}

TEST(PageAllocatorTest, ShortageNamesWhatTheWholeBatchNeeds) {
  auto allocator = allocator_of(2, 5);
  Pages a(6);
  Pages b(5);
  const std::vector<DrawSegment> batch{{0U, Position{0}, a}, {0U, Position{0}, b}};
  expect_refused(allocator, ErrorCode::resource_exhausted,
                 "rank 0 has 5 free pages, the draw needs 6",
                 [&] { return allocator.draw(batch); });
}

TEST(PageAllocatorTest, RefusesSegmentsThatMakeNoSense) {
  auto allocator = allocator_of(2, 5);
  Pages pages(1);
  expect_refused(allocator, ErrorCode::invalid_argument, "base 2 is not below shard_size 2",
                 [&] { return allocator.extend(2, Position{0}, pages); });
  const DrawSegment late{{}, Position{1}, pages};
  expect_refused(allocator, ErrorCode::invalid_argument, "a new chain starts at position 0, not 1",
                 [&] {
                   return allocator.draw({&late, 1});
                 });
  expect_refused(allocator, ErrorCode::invalid_argument, "2 pages to match, room for 1", [&] {
    return allocator.draw_matching(pages_of({2, 3}), pages);
  });
}

// A request is charged its pages and one more per rank, which covers any base.
TEST(PageAllocatorTest, AdmissionChargesOnePageMorePerRank) {
  auto allocator = allocator_of(4, 10);
  EXPECT_EQ(allocator.admissible_pages(), 40U);
  EXPECT_EQ(allocator.admissible_tokens(), 640U);
  EXPECT_EQ(allocator.charge_pages(36), 40U);
  EXPECT_TRUE(allocator.admit(36));
  const auto refused = allocator.admit(37);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::resource_exhausted);
  EXPECT_FALSE(allocator.admit(0xffff'ffff'ffff'ffffU));
}

TEST(PageAllocatorTest, TheChainFreedLastIsDrawnFirstInItsOrder) {
  auto allocator = allocator_of(2, 20);
  const auto a = draw(allocator, 4);
  const auto b = draw(allocator, 6);
  ASSERT_TRUE(allocator.free_chain(a));
  ASSERT_TRUE(allocator.free_chain(b));
  EXPECT_EQ(draw(allocator, 6), b);
  EXPECT_EQ(draw(allocator, 4), a);
}

// Long chains are handled in blocks; what a block is must not be seen.
TEST(PageAllocatorTest, LongChainsAreDrawnAgainInTheirOrder) {
  for (const std::uint32_t shard_size : {1U, 3U, 8U, 3000U}) {
    for (const auto order : {FreeOrder::last_freed_first, FreeOrder::ascending}) {
      auto allocator = allocator_of(shard_size, 12000 / shard_size, order);
      const auto chain = draw(allocator, 9001);
      ASSERT_TRUE(allocator.layout().check_cyclic(chain));
      ASSERT_TRUE(allocator.free_chain(chain));
      EXPECT_EQ(allocator.total_free_pages(), allocator.total_pages());
      EXPECT_EQ(draw(allocator, 9001), chain);
    }
  }
}

TEST(PageAllocatorTest, AscendingOrderDrawsTheLowestFreePages) {
  auto allocator = allocator_of(2, 20, FreeOrder::ascending);
  const auto a = draw(allocator, 4);
  const auto b = draw(allocator, 6);
  ASSERT_TRUE(allocator.free_chain(a));
  ASSERT_TRUE(allocator.free_chain(b));
  EXPECT_EQ(draw(allocator, 10), pages_of({2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST(PageAllocatorTest, AscendingOrderReachesEveryPageOfALargePool) {
  auto allocator = allocator_of(2, 5000, FreeOrder::ascending);
  auto all = draw(allocator, 10000);
  for (std::uint32_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], LogicalPage{2 + i});
  const Pages far{all[9001], all[9002]};
  ASSERT_TRUE(allocator.free_chain(far));
  EXPECT_EQ(draw(allocator, 2), (Pages{all[9002], all[9001]}));  // base: the lowest of equal ranks
}

TEST(PageAllocatorTest, GroupedFreeKeepsItsOwnCopyUntilTheGroupEnds) {
  auto allocator = allocator_of(2, 4);
  auto a = draw(allocator, 4);
  auto b = draw(allocator, 4);
  const auto first = a;
  ASSERT_TRUE(allocator.begin_free_group());
  ASSERT_TRUE(allocator.free_chain(a));
  ASSERT_TRUE(allocator.free_chain(b));
  a.assign(4, LogicalPage{99});  // the caller's memory is its own again
  EXPECT_EQ(allocator.grouped_pages(), 8U);
  EXPECT_EQ(allocator.total_free_pages(), 0U);
  Pages pages(1);
  expect_refused(allocator, ErrorCode::resource_exhausted, "rank 0 has 0 free pages",
                 [&] { return drawn(allocator.draw_chain(pages)); });
  ASSERT_TRUE(allocator.end_free_group());
  EXPECT_EQ(allocator.grouped_pages(), 0U);
  EXPECT_EQ(allocator.total_free_pages(), 8U);
  EXPECT_EQ(draw(allocator, 4), first);  // a group is one free, in the order of its calls
}

TEST(PageAllocatorTest, GroupsDoNotNest) {
  auto allocator = allocator_of(2, 4);
  expect_refused(allocator, ErrorCode::failed_precondition, "no free group is open",
                 [&] { return allocator.end_free_group(); });
  ASSERT_TRUE(allocator.begin_free_group());
  expect_refused(allocator, ErrorCode::failed_precondition, "a free group of 0 pages is open",
                 [&] { return allocator.begin_free_group(); });
}

TEST(PageAllocatorTest, MatchingDrawMirrorsOwnersOfAnotherPool) {
  auto host = allocator_of(4, 100);
  const auto device = pages_of({403, 9, 10, 5, 7, 403});  // another pool's, not even a chain
  Pages pages(device.size());
  ASSERT_TRUE(host.draw_matching(device, pages));
  for (std::size_t k = 0; k < pages.size(); ++k)
    EXPECT_EQ(host.layout().owner(pages[k]), host.layout().owner(device[k]));
  EXPECT_EQ(host.used_pages(), 6U);
  std::sort(pages.begin(), pages.end());
  EXPECT_EQ(std::adjacent_find(pages.begin(), pages.end()), pages.end());
  expect_refused(host, ErrorCode::invalid_argument, "page 3 at position 1 is padding", [&] {
    return host.draw_matching(pages_of({4, 3}), std::span{pages}.first(2));
  });
}

// acceptance 8, in both orders, with and without an open group.
TEST(PageAllocatorTest, MisuseIsRefusedNamingPageAndReason) {
  for (const auto order : {FreeOrder::last_freed_first, FreeOrder::ascending})
    for (const bool grouped : {false, true}) {
      auto allocator = allocator_of(2, 8, order);
      const auto freed = draw(allocator, 2);  // pages 2 and 3
      const auto used = draw(allocator, 4);   // pages 4 to 7
      ASSERT_TRUE(allocator.free_chain(freed));
      if (grouped) {
        ASSERT_TRUE(allocator.begin_free_group());
      }
      const auto refuse = [&](const Pages& pages, const std::string& message) {
        expect_refused(allocator, ErrorCode::invalid_argument, message,
                       [&] { return allocator.free_chain(pages); });
      };
      refuse(freed,
             "page 2 at position 0 is not allocated: freed before, or a page of another pool");
      refuse(pages_of({4, 5, 12}), "page 12 at position 2 is not allocated");
      refuse(pages_of({4, 1}),
             "page 1 at position 1 is padding: pages below 2 are never handed out");
      refuse(pages_of({4, 5, 18}), "page 18 at position 2 is out of range: pages end at 18");
      refuse(pages_of({0xffff'ffff}), "page 4294967295 at position 0 is out of range");
      refuse(pages_of({4, 5, 4}), "page 4 at position 2 stands twice in one free");

      const auto good = pages_of({4, 5});
      const auto bad = pages_of({6, 3});
      const std::vector<FreeSegment> both{{0, Position{0}, good}, {0, Position{0}, bad}};
      expect_refused(allocator, ErrorCode::invalid_argument,
                     "page 3 at position 1 is not allocated", [&] { return allocator.free(both); });
      const std::vector<FreeSegment> twice{{0, Position{0}, good}, {0, Position{0}, good}};
      expect_refused(allocator, ErrorCode::invalid_argument, "page 4 at position 0 stands twice",
                     [&] { return allocator.free(twice); });

      ASSERT_TRUE(allocator.free_chain(used));
      refuse(used, grouped ? "page 4 at position 0 is in the open free group already"
                           : "page 4 at position 0 is not allocated");
    }
}

// acceptance 9: offered to free.
TEST(PageAllocatorTest, RefusesToFreeAChainThatIsNotCyclic) {
  auto allocator = allocator_of(4, 8);
  draw(allocator, 8);  // pages 4 to 11
  const auto refuse = [&](const FreeSegment& segment, const std::string& message) {
    expect_refused(allocator, ErrorCode::invalid_argument, message, [&] {
      return allocator.free({&segment, 1});
    });
  };
  const auto swapped = pages_of({4, 5, 7, 6});
  refuse({0, Position{0}, swapped},
         "owners are not cyclic: page 7 at position 2 belongs to rank 3");
  expect_refused(allocator, ErrorCode::invalid_argument, "owners are not cyclic",
                 [&] { return allocator.free_chain(swapped); });
  const auto tail = pages_of({6, 7});
  refuse({1, Position{2}, tail},
         "owners are not cyclic: page 6 at position 2 belongs to rank 2, a chain of base 1 has "
         "rank 3");
  refuse({4, Position{2}, tail}, "base 4 is not below shard_size 4");
  const FreeSegment right{0, Position{2}, tail};
  EXPECT_TRUE(allocator.free({&right, 1}));
}

TEST(PageAllocatorTest, SnapshotRestoresTheWholeState) {
  for (const auto order : {FreeOrder::last_freed_first, FreeOrder::ascending}) {
    auto allocator = allocator_of(3, 70, order);
    const auto a = draw(allocator, 20);
    const auto b = draw(allocator, 30);
    const auto c = draw(allocator, 11);
    ASSERT_TRUE(allocator.free_chain(a));
    ASSERT_TRUE(allocator.begin_free_group());
    ASSERT_TRUE(allocator.free_chain(b));
    auto replica = allocator_of(3, 70, order);
    ASSERT_TRUE(replica.restore(allocator.snapshot()));
    EXPECT_EQ(replica.snapshot(), allocator.snapshot());
    for (auto* one : {&allocator, &replica}) {
      EXPECT_FALSE(one->free_chain(b));
      EXPECT_FALSE(one->free_chain(a));
      ASSERT_TRUE(one->end_free_group());
      ASSERT_TRUE(one->free_chain(c));
    }
    EXPECT_EQ(draw(replica, 210), draw(allocator, 210));
    EXPECT_EQ(replica.snapshot(), allocator.snapshot());
  }
}

TEST(PageAllocatorTest, RefusesSnapshotsOfOtherPools) {
  const auto other = [](const PageAllocator& from, const std::string& message) {
    auto allocator = allocator_of(2, 8);
    expect_refused(allocator, ErrorCode::failed_precondition, message,
                   [&] { return allocator.restore(from.snapshot()); });
  };
  other(allocator_of(4, 8), "shard_size is 2 here, 4 in the snapshot");
  other(allocator_of(2, 9), "pages_per_rank is 8 here, 9 in the snapshot");
  other(allocator_of(2, 8, FreeOrder::ascending), "order is 0 here, 1 in the snapshot");
  other(PageAllocator::create(PageLayout::create(2, 64).value(), 8).value(),
        "page_size is 16 here, 64 in the snapshot");
}

// Any word of a snapshot may be wrong: it is refused and changes nothing, or it is another valid
// state.
TEST(PageAllocatorTest, DamagedSnapshotsAreRefusedOrValid) {
  auto allocator = allocator_of(2, 6);
  const auto chain = draw(allocator, 3);
  draw(allocator, 2);
  ASSERT_TRUE(allocator.begin_free_group());
  ASSERT_TRUE(allocator.free_chain(chain));
  const auto good = allocator.snapshot();
  std::size_t refused = 0;
  for (std::size_t at = 0; at < good.size(); ++at)
    for (const int flip : {0x01, 0x02, 0x04, 0x80, 0xff}) {
      auto bad = good;
      bad[at] ^= static_cast<std::byte>(flip);
      auto replica = allocator_of(2, 6);
      const auto before = replica.snapshot();
      if (replica.restore(bad)) {
        ASSERT_EQ(replica.snapshot(), bad);
        ASSERT_EQ(replica.used_pages() + replica.total_free_pages() + replica.grouped_pages(), 12U);
      } else {
        ++refused;
        ASSERT_EQ(replica.snapshot(), before);
      }
    }
  EXPECT_GT(refused, good.size() * 4);
  for (std::size_t size = 0; size < good.size(); ++size) {
    auto replica = allocator_of(2, 6);
    ASSERT_EQ(replica.restore(std::span{good}.first(size)).error().code,
              ErrorCode::invalid_argument);
  }
}

}  // namespace
}  // namespace kvshard
