#include "kvshard/bootstrap.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <string>
#include <vector>

#include "kvshard/page_allocator.hpp"

namespace kvshard {
namespace {

using Rules = std::vector<AdmissionRule>;

CapacityCheck check_of(std::uint32_t shard_size, std::uint32_t page_size,
                       std::uint64_t tokens_per_rank, Rules rules) {
  const auto layout = PageLayout::create(shard_size, page_size).value();
  auto check = CapacityCheck::create(layout, tokens_per_rank, std::move(rules));
  EXPECT_TRUE(check) << check.error().message;
  return std::move(check).value();
}

TEST(CapacityCheckTest, GivesTheLimitsOfTheRulesInForce) {
  EXPECT_EQ(check_of(2, 64, 16384, {}).limit().tokens, 32768U);
  EXPECT_EQ(check_of(2, 64, 16384, {AdmissionRule::normal()}).limit().tokens, 32638U);
  const auto check = check_of(2, 64, 16384, {AdmissionRule::normal(), AdmissionRule::ignore_eos()});
  EXPECT_EQ(check.limit().tokens, 32576U);
  EXPECT_EQ(check.limit().rule, "ignore_eos");
  EXPECT_TRUE(check.check_intake(32576));
  const auto refused = check.check_intake(32577);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(
      refused.error().message,
      "a prompt of 32577 tokens can never be admitted: the limit is 32576 by rule ignore_eos");
}

TEST(CapacityCheckTest, AnUnshardedGroupKeepsItsPool) {
  const auto check = check_of(1, 64, 16384, {AdmissionRule::normal(), AdmissionRule::ignore_eos()});
  EXPECT_EQ(check.limit().tokens, 16384U);
  EXPECT_EQ(check.limit().rule, "physical");
}

TEST(CapacityCheckTest, APromptThatDoesNotFitNowIsNotOneThatNeverFits) {
  const auto check = check_of(2, 64, 16384, {AdmissionRule::normal()});
  EXPECT_TRUE(check.check_now(1000, 32768));
  const auto later = check.check_now(1000, 1129);  // 1000 + 1 + 128 < 1129 is false
  ASSERT_FALSE(later);
  EXPECT_EQ(later.error().code, ErrorCode::resource_exhausted);
  EXPECT_EQ(later.error().message,
            "a prompt of 1000 tokens is not admitted now: 1129 available, by rule normal");
  EXPECT_TRUE(check.check_now(1000, 1130));
  EXPECT_EQ(check.check_now(32639, 0).error().code, ErrorCode::invalid_argument);
}

TEST(CapacityCheckTest, RefusesPoolsAndRulesThatAdmitNothing) {
  const auto layout = PageLayout::create(2, 64).value();
  EXPECT_FALSE(CapacityCheck::create(layout, 0, {}));
  const auto ragged = CapacityCheck::create(layout, 100, {});
  ASSERT_FALSE(ragged);
  EXPECT_NE(ragged.error().message.find("100 tokens per rank"), std::string::npos);
  EXPECT_FALSE(CapacityCheck::create(layout, std::uint64_t{1} << 63, {}));
  const auto nothing = CapacityCheck::create(layout, 64, {AdmissionRule::normal()});
  ASSERT_FALSE(nothing);
  EXPECT_NE(nothing.error().message.find("rule normal admits no prompt to a pool of 128"),
            std::string::npos);
  const AdmissionRule greedy{"greedy", 0xffff'ffff, 0xffff'ffff, true, true};
  EXPECT_FALSE(CapacityCheck::create(layout, 1U << 20, {greedy}));
}

// acceptance 10. The right-hand sides are the table of the design, written out once more by hand.
TEST(CapacityCheckPropertyTest, FollowsTheLawForEveryShape) {
  for (const std::uint64_t n : {1, 2, 3, 4, 8, 16})
    for (const std::uint64_t ps : {1, 2, 16, 64, 128})
      for (const std::uint64_t tokens : {std::uint64_t{16384}, 4 * ps, 37 * ps, 1000 * ps}) {
        const auto n32 = static_cast<std::uint32_t>(n);
        const auto ps32 = static_cast<std::uint32_t>(ps);
        const auto all = n * tokens;
        struct Law {
          AdmissionRule rule;
          std::uint64_t limit;
        };
        for (const auto& [rule, limit] :
             {Law{AdmissionRule::physical(), all}, Law{AdmissionRule::normal(), all - n * ps - 2},
              Law{AdmissionRule::ignore_eos(), (all - n * ps - 3) / ps * ps}}) {
          const auto check = check_of(n32, ps32, tokens, {rule});
          const auto expected = n == 1 ? tokens : limit;
          ASSERT_EQ(check.limit().tokens, expected) << rule.name << " N " << n << " ps " << ps;
          ASSERT_TRUE(check.check_intake(expected));
          ASSERT_TRUE(check.check_now(expected, all));
          const auto refused = check.check_intake(expected + 1);
          ASSERT_FALSE(refused);
          ASSERT_EQ(refused.error().code, ErrorCode::invalid_argument);
          for (const auto& part : {std::to_string(expected + 1), std::to_string(expected),
                                   n == 1 ? std::string{"physical"} : rule.name})
            ASSERT_NE(refused.error().message.find(part), std::string::npos);

          // Intake refuses exactly what the predicate refuses on an empty pool.
          const auto rounded = (expected + 1 + ps - 1) / ps * ps;
          if (n > 1 && rule.name == "normal") {
            ASSERT_FALSE(expected + 1 + 1 + n * ps < all);
          }
          if (n > 1 && rule.name == "ignore_eos") {
            ASSERT_FALSE(all - n * ps > rounded + 1 + 1);
          }
        }
      }
}

// The short form that holds for larger pages is wrong for two tokens a page.
TEST(CapacityCheckPropertyTest, PagesOfTwoTokensDoNotSimplify) {
  for (const std::uint32_t n : {2U, 4U, 8U, 16U}) {
    const auto limit = [n](std::uint32_t page_size) {
      return check_of(n, page_size, 16384, {AdmissionRule::ignore_eos()}).limit().tokens;
    };
    EXPECT_EQ(limit(64), n * 16384 - (n + 1) * 64);
    EXPECT_EQ(limit(16), n * 16384 - (n + 1) * 16);
    EXPECT_EQ(limit(2), n * 16384 - (n + 2) * 2);
    EXPECT_EQ(limit(1), n * 16384 - (n + 3) * 1);
  }
}

// A first-come queue: only its head may be admitted. Returns false when the head is refused
// although nothing runs, that is, when it would wait until a timeout.
bool queue_drains(const CapacityCheck& check, const CapacityCheck& intake, PageAllocator allocator,
                  std::mt19937& random, std::size_t& admitted, std::size_t& refused) {
  const auto& layout = allocator.layout();
  std::deque<std::uint64_t> queue;
  std::vector<std::vector<LogicalPage>> running;
  const auto finish_one = [&] {
    std::swap(running[random() % running.size()], running.back());
    EXPECT_TRUE(allocator.free_chain(running.back()));
    running.pop_back();
  };
  for (int arrivals = 300; arrivals > 0 || !queue.empty();) {
    if (arrivals > 0 && random() % 2 == 0) {
      --arrivals;
      const auto top = intake.limit().tokens;
      const auto prompt = random() % 4 == 0 ? top - 2 + random() % 5 : 1 + random() % top;
      if (intake.check_intake(prompt)) {
        queue.push_back(prompt);
      } else {
        ++refused;
      }
    }
    if (!queue.empty() && check.check_now(queue.front(), allocator.admissible_tokens())) {
      std::vector<LogicalPage> pages(layout.pages_for(queue.front()));
      const auto base = allocator.draw_chain(pages);
      EXPECT_TRUE(base) << base.error().message;
      running.push_back(std::move(pages));
      queue.pop_front();
      ++admitted;
    } else if (!running.empty()) {
      finish_one();
    } else if (!queue.empty()) {
      return false;
    }
  }
  return true;
}

TEST(CapacityCheckQueueTest, TheHeadIsNeverStuckBehindAPromptThatPassedIntake) {
  std::mt19937 random{23};
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 8, 16})
    for (const std::uint32_t page_size : {1, 2, 16, 64})
      for (const auto& rules :
           {Rules{}, Rules{AdmissionRule::normal()}, Rules{AdmissionRule::ignore_eos()},
            Rules{AdmissionRule::normal(), AdmissionRule::ignore_eos()}}) {
        const auto layout = PageLayout::create(shard_size, page_size).value();
        const std::uint32_t pages = 12;
        const auto check = check_of(shard_size, page_size, std::uint64_t{pages} * page_size, rules);
        const auto allocator = PageAllocator::create(layout, pages).value();
        std::size_t admitted = 0;
        std::size_t refused = 0;
        ASSERT_TRUE(queue_drains(check, check, allocator, random, admitted, refused));
        ASSERT_EQ(admitted + refused, 300U);
        ASSERT_GT(refused, 10U);
        ASSERT_GT(admitted, 100U);
      }
}

// What the derived limit prevents: an intake that only asks for room blocks the queue.
TEST(CapacityCheckQueueTest, AnIntakeThatIgnoresTheRulesGetsStuck) {
  std::mt19937 random{23};
  const auto layout = PageLayout::create(4, 16).value();
  const auto check = check_of(4, 16, 192, {AdmissionRule::ignore_eos()});
  const auto naive = check_of(4, 16, 192, {});
  const auto allocator = PageAllocator::create(layout, 12).value();
  std::size_t admitted = 0;
  std::size_t refused = 0;
  EXPECT_FALSE(queue_drains(check, naive, allocator, random, admitted, refused));
}

}  // namespace
}  // namespace kvshard
