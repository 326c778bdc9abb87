#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvshard/log.hpp"
#include "kvshard/registry.hpp"
#include "support/registry_examples.hpp"
#include "support/registry_services.hpp"

// What every registry does. A test file includes this and instantiates RegistryConformance and
// RegistryExpiryConformance with how its registry is started.
namespace kvshard::testing {

class RegistryConformance : public ::testing::TestWithParam<RegistryKind> {
 protected:
  // Long enough that nothing expires in a test, however slow the machine.
  explicit RegistryConformance(std::chrono::seconds time_to_live = 10 * kRegistryLimit)
      : time_to_live_{time_to_live} {}
  void SetUp() override {
    service_ = GetParam().start(time_to_live_);
    if (!service_) GTEST_SKIP() << GetParam().name << " is not installed (scripts/setup.sh does)";
    registry_ = service_->connect();
  }

  [[nodiscard]] std::vector<RankAnnouncement> listed(const char* group = "models/llama") const {
    auto ranks = registry_->ranks(group, kRegistryLimit);
    EXPECT_TRUE(ranks) << ranks.error().message;
    return ranks.value_or(std::vector<RankAnnouncement>{});
  }

  const std::chrono::seconds time_to_live_;
  std::unique_ptr<RegistryService> service_;
  std::unique_ptr<Registry> registry_;
};

class RegistryExpiryConformance : public RegistryConformance {
 protected:
  RegistryExpiryConformance() : RegistryConformance{1s} {}
};

TEST_P(RegistryConformance, AGroupIsFoundWhenItsLastRankIsThere) {
  auto first = Announcement::start(*registry_, make_rank(1, 2), kRegistryLimit);
  ASSERT_TRUE(first) << first.error().message;
  Result<std::unique_ptr<Announcement>> second{std::unique_ptr<Announcement>{}};
  Result<GroupSpec> found{GroupSpec{}};
  {
    const std::jthread waiter{
        [&] { found = wait_for_group(*registry_, "models/llama", kRegistryLimit); }};
    second = Announcement::start(*registry_, make_rank(0, 2), kRegistryLimit);
  }
  ASSERT_TRUE(second) << second.error().message;
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found.value().epoch, 1U);
  ASSERT_EQ(found.value().members.size(), 2U);
  EXPECT_EQ(found.value().members[0], (GroupMember{0, "127.0.0.1", 5000, 100}));
  EXPECT_EQ(found.value().members[1], (GroupMember{1, "127.0.0.1", 5001, 101}));
}

TEST_P(RegistryConformance, GivesARankBackAsItWasAnnounced) {
  auto rank = make_rank(kMaxShardSize - 1, kMaxShardSize);
  rank.epoch = std::numeric_limits<std::uint64_t>::max();
  rank.incarnation = std::numeric_limits<std::uint64_t>::max();
  rank.host = "fe80::1%eth0";
  rank.port = 65535;
  rank.geometry_fields = {{"\"quoted\\\n", "\xc3\xa9\xf0\x9f\x98\x80"},
                          {"empty", ""},
                          {"long", std::string(kMaxGeometryBytes / 2, 'x')}};
  ASSERT_TRUE(registry_->announce(rank, kRegistryLimit));
  ASSERT_EQ(listed().size(), 1U);
  EXPECT_EQ(listed().front(), rank);
  ASSERT_TRUE(registry_->renew(rank, kRegistryLimit));
  EXPECT_EQ(listed().size(), 1U);
}

TEST_P(RegistryConformance, AnAnnouncementThatEndsWithdrawsItsRank) {
  {
    auto announcement = Announcement::start(*registry_, make_rank(0, 1), kRegistryLimit);
    ASSERT_TRUE(announcement) << announcement.error().message;
    EXPECT_EQ(listed().size(), 1U);
    EXPECT_TRUE(announcement.value()->status());
  }
  EXPECT_TRUE(listed().empty());
}

TEST_P(RegistryConformance, AMismatchedRankIsRefusedNamingFieldAndValues) {
  ASSERT_TRUE(registry_->announce(make_rank(0, 2), kRegistryLimit));
  auto other = make_rank(1, 2);
  other.geometry_fields[0].second = "16";
  const auto geometry = registry_->announce(other, kRegistryLimit);
  ASSERT_FALSE(geometry);
  EXPECT_EQ(geometry.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(geometry.error().message, {"kv.page_size", "'64'", "'16'", "rank 0", "rank 1"}))
      << geometry.error().message;
  const auto size = registry_->renew(make_rank(2, 3), kRegistryLimit);
  ASSERT_FALSE(size);
  EXPECT_EQ(size.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(size.error().message, {"shard_size", "2", "3"})) << size.error().message;
  EXPECT_EQ(listed().size(), 1U);
  // Alone in its epoch, a rank may say something new of itself.
  auto successor = make_rank(0, 3);
  successor.incarnation = 999;
  ASSERT_TRUE(registry_->announce(successor, kRegistryLimit));
  EXPECT_EQ(listed().front(), successor);
}

TEST_P(RegistryConformance, OfRanksThatContradictOnlyOneShapeIsListedWhoeverIsFirst) {
  for (std::uint64_t epoch = 1; epoch <= 8; ++epoch) {
    constexpr std::uint32_t kRanks = 6;
    std::array<Result<milliseconds>, kRanks> announced{{milliseconds{}, milliseconds{},
                                                        milliseconds{}, milliseconds{},
                                                        milliseconds{}, milliseconds{}}};
    {
      std::vector<std::jthread> threads;
      for (std::uint32_t i = 0; i < kRanks; ++i)
        threads.emplace_back([&, i] {
          auto rank = make_rank(i, kRanks, epoch);
          rank.group = "race";
          rank.geometry_fields[0].second = i % 2 == 0 ? "64" : "16";
          announced[i] = registry_->announce(rank, kRegistryLimit);
        });
    }
    std::size_t accepted = 0;
    for (const auto& result : announced) {
      if (result) ++accepted;
      if (!result) {
        EXPECT_EQ(result.error().code, ErrorCode::failed_precondition) << result.error().message;
      }
    }
    auto ranks = listed("race");
    std::erase_if(ranks, [epoch](const auto& rank) { return rank.epoch != epoch; });
    EXPECT_EQ(ranks.size(), accepted);
    EXPECT_EQ(accepted, kRanks / 2) << "epoch " << epoch;
    for (const auto& rank : ranks)
      EXPECT_EQ(rank.geometry_fields, ranks.front().geometry_fields) << "epoch " << epoch;
  }
}

TEST_P(RegistryConformance, ALaterIncarnationTakesThePlaceAndTheEarlierIsTold) {
  ASSERT_TRUE(registry_->announce(make_rank(0, 1), kRegistryLimit));
  auto successor = make_rank(0, 1);
  successor.incarnation = 999;
  ASSERT_TRUE(registry_->announce(successor, kRegistryLimit));
  const auto renewed = registry_->renew(make_rank(0, 1), kRegistryLimit);
  ASSERT_FALSE(renewed);
  EXPECT_EQ(renewed.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(renewed.error().message, {"incarnation 3e7, not 64"}))
      << renewed.error().message;
  EXPECT_TRUE(registry_->withdraw(make_rank(0, 1), kRegistryLimit));
  ASSERT_EQ(listed().size(), 1U) << "only its own incarnation is a rank's to withdraw";
  EXPECT_EQ(listed().front(), successor);
}

TEST_P(RegistryConformance, ARenewalDisplacesNobodyWhoeverIsFirst) {
  for (std::uint64_t epoch = 1; epoch <= 16; ++epoch) {
    auto successor = make_rank(0, 1, epoch);
    successor.incarnation = 999;
    {
      const std::jthread renewal{[&] {
        const auto renewed = registry_->renew(make_rank(0, 1, epoch), kRegistryLimit);
        if (!renewed) {
          EXPECT_EQ(renewed.error().code, ErrorCode::failed_precondition);
        }
      }};
      EXPECT_TRUE(registry_->announce(successor, kRegistryLimit));
    }
    auto ranks = listed();
    std::erase_if(ranks, [epoch](const auto& rank) { return rank.epoch != epoch; });
    EXPECT_EQ(ranks, std::vector{successor});
  }
}

TEST_P(RegistryConformance, ARenewalListsWhatTheRegistryDoesNotKnow) {
  ASSERT_TRUE(registry_->renew(make_rank(0, 1), kRegistryLimit));
  EXPECT_EQ(listed().size(), 1U);
  EXPECT_TRUE(registry_->withdraw(make_rank(0, 1), kRegistryLimit));
  EXPECT_TRUE(registry_->withdraw(make_rank(0, 1), kRegistryLimit)) << "it is gone, as asked";
  EXPECT_TRUE(listed().empty());
}

TEST_P(RegistryExpiryConformance, ARankThatRenewsStaysAndOneThatDoesNotExpires) {
  const auto start = std::chrono::steady_clock::now();
  const auto stays = Announcement::start(*registry_, make_rank(0, 2), kRegistryLimit);
  ASSERT_TRUE(stays) << stays.error().message;
  const auto granted = registry_->announce(make_rank(1, 2), kRegistryLimit);
  ASSERT_TRUE(granted);
  EXPECT_GE(granted.value(), time_to_live_);
  EXPECT_TRUE(eventually([&] {
    const auto ranks = listed();
    return ranks.size() == 1 && ranks.front().shard_rank == 0;
  }));
  EXPECT_GE(std::chrono::steady_clock::now() - start, granted.value() / 2);
}

TEST_P(RegistryConformance, GroupsAreApartAlsoWhereOneNameBeginsAnother) {
  std::vector<std::string> names{"a", "a/b", "a.b", "a:1/0", "A", "a1", "a/1/0", "aa"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    auto rank = make_rank(0, 1);
    rank.group = names[i];
    rank.port = static_cast<std::uint16_t>(i + 1);
    ASSERT_TRUE(registry_->announce(rank, kRegistryLimit));
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto ranks = listed(names[i].c_str());
    ASSERT_EQ(ranks.size(), 1U) << names[i];
    EXPECT_EQ(ranks.front().port, i + 1);
  }
}

// acceptance 45: half a group, two epochs
TEST_P(RegistryConformance, AWaitForAHalfGroupIsBoundedAndSaysWhatIsMissing) {
  const std::vector<RankAnnouncement> ranks{make_rank(0, 3, 8), make_rank(1, 2, 10)};
  std::vector<std::unique_ptr<Announcement>> announcements;
  for (const auto& rank : ranks) {
    auto announced = Announcement::start(*registry_, rank, kRegistryLimit);
    ASSERT_TRUE(announced) << announced.error().message;
    announcements.push_back(std::move(announced).value());
  }
  const auto missing = wait_for_group(*registry_, "models/llama", 300ms);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::deadline_exceeded);
  EXPECT_TRUE(holds(missing.error().message, {"epoch 10 has 1 of 2 ranks, missing 0",
                                              "epoch 8 has 1 of 3 ranks, missing 1, 2", "300 ms"}))
      << missing.error().message;
  // A whole epoch is taken, though a newer one has begun.
  const auto whole = Announcement::start(*registry_, make_rank(0, 1, 9), kRegistryLimit);
  const auto found = wait_for_group(*registry_, "models/llama", kRegistryLimit);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found.value().epoch, 9U);
}

TEST_P(RegistryConformance, RefusesWhatCannotBeARankOrAGroup) {
  for (const auto& refused : {registry_->announce(make_rank(2, 2), kRegistryLimit),
                              registry_->renew(make_rank(0, 1, 0), kRegistryLimit)}) {
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
  }
  EXPECT_EQ(registry_->withdraw(make_rank(1, 0), kRegistryLimit).error().code,
            ErrorCode::invalid_argument);
  EXPECT_EQ(registry_->ranks("a b", kRegistryLimit).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(registry_->ranks("", kRegistryLimit).error().code, ErrorCode::invalid_argument);
}

TEST_P(RegistryConformance, IsReachedByItsAddressAsOneString) {
  const auto by_address = make_registry(service_->address());
  ASSERT_TRUE(by_address) << by_address.error().message;
  ASSERT_TRUE(registry_->announce(make_rank(0, 1), kRegistryLimit));
  EXPECT_TRUE(wait_for_group(*by_address.value(), "models/llama", kRegistryLimit));
}

TEST_P(RegistryConformance, AStopRequestEndsACall) {
  const std::stop_token stopped = stopped_token();
  const auto ranks = registry_->ranks("g", 1h, stopped);
  ASSERT_FALSE(ranks);
  EXPECT_EQ(ranks.error().code, ErrorCode::cancelled);
  const auto found = wait_for_group(*registry_, "g", 1h, stopped);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::cancelled);
}

// acceptance 45: the registry dies, and comes back
TEST_P(RegistryExpiryConformance, RanksAreListedAgainWhenALostRegistryComesBack) {
  set_log_level(LogLevel::off);  // an outage is warned of, as it should
  {
    const auto first = Announcement::start(*registry_, make_rank(0, 2), kRegistryLimit);
    const auto second = Announcement::start(*registry_, make_rank(1, 2), kRegistryLimit);
    ASSERT_TRUE(first && second);
    service_->kill();
    const auto nothing = registry_->ranks("models/llama", kRegistryLimit);
    ASSERT_FALSE(nothing);
    EXPECT_EQ(nothing.error().code, ErrorCode::unavailable) << nothing.error().message;
    EXPECT_TRUE(eventually([&] { return !first.value()->status().ok(); }));
    EXPECT_EQ(first.value()->status().error().code, ErrorCode::unavailable);
    service_->start_again();
    const auto start = std::chrono::steady_clock::now();
    const auto found = wait_for_group(*registry_, "models/llama", kRegistryLimit);
    EXPECT_TRUE(found) << found.error().message;
    EXPECT_TRUE(
        eventually([&] { return first.value()->status().ok() && second.value()->status().ok(); }));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  }
  EXPECT_TRUE(listed().empty());
  set_log_level(LogLevel::warning);
}

}  // namespace kvshard::testing
