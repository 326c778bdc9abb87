#include "kvshard/page_layout.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "layout/cyclic_scan.hpp"

namespace kvshard {
namespace {

const std::vector<std::uint32_t> kShardSizes{1, 2, 3, 4, 5, 6, 7, 8, 16};
const std::vector<std::uint32_t> kPageSizes{1, 2, 16, 64, 128};

PageLayout layout_of(std::uint32_t shard_size, std::uint32_t page_size = 16) {
  return PageLayout::create(shard_size, page_size).value();
}

// A chain whose local pages are random, so that owners are all that is regular.
std::vector<LogicalPage> random_chain(const PageLayout& layout, std::uint32_t base,
                                      std::size_t pages, std::mt19937& random) {
  const auto top = 0xffff'ffffU / layout.shard_size() - 1;
  std::uniform_int_distribution<std::uint32_t> local{1, top};
  std::vector<LogicalPage> chain;
  for (std::size_t k = 0; k < pages; ++k)
    chain.push_back(layout.logical(layout.owner_after(base, k), LocalPage{local(random)}));
  return chain;
}

TEST(PageLayoutTest, RefusesEmptyShapesAndThoseBeyond32Bits) {
  EXPECT_EQ(PageLayout::create(0, 16).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(PageLayout::create(4, 0).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(PageLayout::create(1U << 16, 1U << 16).error().code, ErrorCode::invalid_argument);
  EXPECT_TRUE(PageLayout::create((1U << 16) - 1, 1U << 16));
}

TEST(PageLayoutTest, PlacesPageAtOwnerAndLocalPage) {
  const auto layout = layout_of(4);
  EXPECT_EQ(layout.place(LogicalPage{14}), (Placement{2, LocalPage{3}}));
  EXPECT_EQ(layout.logical(2, LocalPage{3}), LogicalPage{14});
  EXPECT_TRUE(layout.is_padding(LogicalPage{3}));
  EXPECT_FALSE(layout.is_padding(LogicalPage{4}));
}

TEST(PageLayoutTest, ExtensionStartsPageAligned) {
  const auto layout = layout_of(4, 16);
  EXPECT_EQ(layout.next_position(48).value(), Position{3});
  const auto status = layout.next_position(50);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("50 tokens are 2 into a page of 16"), std::string::npos);
  EXPECT_FALSE(layout.next_position(std::uint64_t{16} << 32));
}

TEST(PageLayoutPropertyTest, PlacesAreABijection) {
  for (const auto shard_size : kShardSizes) {
    const auto layout = layout_of(shard_size);
    for (std::uint32_t l = 0; l < 40 * shard_size; ++l) {
      const auto [rank, page] = layout.place(LogicalPage{l});
      ASSERT_LT(rank, shard_size);
      ASSERT_EQ(layout.logical(rank, page), LogicalPage{l});
      ASSERT_EQ(layout.is_padding(LogicalPage{l}), page == LocalPage{0});
    }
  }
}

TEST(PageLayoutPropertyTest, TokenSlotsAreABijection) {
  for (const auto shard_size : kShardSizes)
    for (const auto page_size : kPageSizes) {
      const auto layout = layout_of(shard_size, page_size);
      std::uint64_t slot = 0;  // slots ascend in exactly this order of the loops
      for (std::uint32_t q = 0; q < 5; ++q)
        for (std::uint32_t r = 0; r < shard_size; ++r)
          for (std::uint32_t o = 0; o < page_size; ++o, ++slot) {
            const TokenPlace place{r, LocalPage{q}, o};
            ASSERT_EQ(layout.token_slot(place), slot);
            ASSERT_EQ(layout.token_place(slot), place);
          }
      const TokenPlace last{shard_size - 1, LocalPage{0xffff'ffffU / shard_size - 1},
                            page_size - 1};
      ASSERT_EQ(layout.token_place(layout.token_slot(last)), last);
    }
}

TEST(PageLayoutPropertyTest, PagesForRoundsUp) {
  for (const auto page_size : kPageSizes) {
    const auto layout = layout_of(3, page_size);
    for (std::uint64_t tokens = 0; tokens < 400; ++tokens) {
      const auto pages = layout.pages_for(tokens);
      ASSERT_GE(pages * page_size, tokens);
      ASSERT_LT(pages * page_size, tokens + page_size);
    }
  }
}

TEST(PageLayoutPropertyTest, SharesAddUpAndFollowOwners) {
  for (const auto shard_size : kShardSizes) {
    const auto layout = layout_of(shard_size);
    for (std::uint32_t base = 0; base < shard_size; ++base)
      for (std::uint64_t pages = 0; pages < 3 * shard_size + 2; ++pages) {
        std::vector<std::uint64_t> counted(shard_size);
        for (std::uint64_t k = 0; k < pages; ++k) ++counted[layout.owner_after(base, k)];
        for (std::uint32_t rank = 0; rank < shard_size; ++rank)
          ASSERT_EQ(layout.share(pages, layout.steps(base, rank)), counted[rank]);
      }
  }
}

TEST(PageLayoutPropertyTest, ExactDivisionAgreesWithDivision) {
  std::mt19937 random{7};
  for (std::uint32_t shard_size = 1; shard_size < 300; ++shard_size) {
    const auto divisor = layout_of(shard_size, 1).divisor();
    const auto check = [&](std::uint32_t n) {
      ASSERT_EQ(divisor.divides(n), n % shard_size == 0) << n << " by " << shard_size;
      if (n % shard_size == 0) {
        ASSERT_EQ(divisor.quotient(n), n / shard_size);
      }
    };
    for (std::uint32_t n = 0; n < 2 * shard_size + 2; ++n) {
      check(n);
      check(0xffff'ffffU - n);
    }
    for (int i = 0; i < 1000; ++i) check(static_cast<std::uint32_t>(random()));
  }
}

// acceptance 9: the check that stands wherever a chain enters.
TEST(CyclicCheckTest, NamesThePositionThatBreaksTheCycle) {
  const auto layout = layout_of(3);
  const std::vector<LogicalPage> chain{LogicalPage{5}, LogicalPage{9}, LogicalPage{4},
                                       LogicalPage{3}};
  const auto status = layout.check_cyclic(chain, Position{100});
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(status.error().message,
            "owners are not cyclic: page 3 at position 103 belongs to rank 0, the chain goes on at "
            "rank 2 "
            "of 3");
}

TEST(CyclicCheckTest, NamesThePaddingPage) {
  const auto layout = layout_of(3);
  const std::vector<LogicalPage> chain{LogicalPage{4}, LogicalPage{2}};
  const auto status = layout.check_cyclic(chain);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("page 2 at position 1 is padding"), std::string::npos);
}

// acceptance 9: every single damage to a chain is found, by every version of the scan that runs
// here.
TEST(CyclicCheckPropertyTest, FindsOneWrongPageAnywhere) {
  std::mt19937 random{11};
  for (const auto shard_size : kShardSizes) {
    const auto layout = layout_of(shard_size);
    for (const std::size_t pages : {1, 2, 4, 5, 8, 9, 15, 16, 17, 18, 31, 32, 33, 34, 70, 500}) {
      for (std::uint32_t base = 0; base < shard_size; ++base) {
        const auto good = random_chain(layout, base, pages, random);
        for (const auto scan : cyclic_scans()) {
          ASSERT_TRUE(scan(good, layout));
        }
        ASSERT_TRUE(layout.check_cyclic(good));
        for (std::size_t k = 0; k < pages; k += 1 + pages / 40) {
          auto bad = good;
          std::vector<std::uint32_t> wrong;
          wrong.push_back(layout.owner_after(base, k));  // padding of the right owner
          if (shard_size > 1 && k > 0) {
            wrong.push_back(index(good[k]) + 1 +
                            static_cast<std::uint32_t>(random()) % (shard_size - 1));
            wrong.push_back(layout.owner_after(base, k + 1) + shard_size);
          }
          for (const auto page : wrong) {
            bad[k] = LogicalPage{page};
            const bool fine =
                !layout.is_padding(bad[k]) && layout.owner(bad[k]) == layout.owner(good[k]);
            for (const auto scan : cyclic_scans()) {
              ASSERT_EQ(scan(bad, layout), fine) << page;
            }
            ASSERT_EQ(layout.check_cyclic(bad).ok(), fine);
          }
        }
      }
    }
  }
}

TEST(ClassMajorOrderPropertyTest, IsABijectionThatPutsClassesTogether) {
  for (const auto shard_size : kShardSizes) {
    const auto layout = layout_of(shard_size);
    for (const std::uint32_t first : {0U, 1U, 5U, 1000U})
      for (std::uint32_t pages = 0; pages < 4 * shard_size + 3; ++pages) {
        const ClassMajorOrder order{layout, Position{first}, pages};
        std::set<std::uint32_t> seen;
        std::set<std::uint32_t> classes;
        for (std::uint32_t i = 0; i < pages; ++i) {
          const auto position = order.position(i);
          ASSERT_GE(index(position), first);
          ASSERT_LT(index(position), first + pages);
          ASSERT_TRUE(seen.insert(index(position)).second);
          ASSERT_EQ(order.destination(position), i);
          const auto cls = index(position) % shard_size;
          if (i > 0 && index(order.position(i - 1)) % shard_size == cls) {
            ASSERT_EQ(index(position), index(order.position(i - 1)) + shard_size);
          } else {
            ASSERT_TRUE(classes.insert(cls).second) << "class " << cls << " is split";
          }
        }
      }
  }
}

}  // namespace
}  // namespace kvshard
