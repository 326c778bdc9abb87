#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <iostream>
#include <mutex>
#include <thread>

#include "kvshard/log.hpp"
#include "support/fault_cluster.hpp"
#include "support/registry_examples.hpp"
#include "support/registry_services.hpp"

// A registry introduces and has no further part: what happens to it never reaches a session.
namespace kvshard::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;
using testing::kRegistries;
using testing::kRegistryLimit;
using testing::registry_name;
using testing::RegistryKind;
using testing::RegistryService;

constexpr std::chrono::seconds kTimeToLive = 3s;
// Seconds are promised. Renewals that failed are tried again after at most one; the rest is room for
// a machine under load.
constexpr std::chrono::seconds kResumeLimit = 10s;
constexpr std::uint64_t kRequestsPerPhase = 200;

std::int64_t ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                               start)
      .count();
}

FaultSetup setup_of(const char* group, std::uint32_t shard_size) {
  FaultSetup setup;
  setup.shard_size = shard_size;
  setup.prefill.group = group;
  return setup;
}

struct Session {
  std::unique_ptr<DecodeRank> decode;
  GroupId group;
};

/// Requests without a pause on a thread of its own, by all sessions in turn, until one fails.
/// The cluster's ranks, pages and events are that thread's for as long as this lives.
class Soak {
 public:
  Soak(FaultCluster& cluster, Session first)
      : cluster_{cluster}, thread_{[this](const std::stop_token& stop) { run(stop); }} {
    add(std::move(first));
  }
  ~Soak() {
    thread_.request_stop();
    thread_.join();
    for (const Session& session : sessions_) {
      const DecodeStats stats = session.decode->stats();
      EXPECT_EQ(stats.pulls_done, stats.pulls_started);
      EXPECT_EQ(stats.peers_lost, 0U);
      EXPECT_EQ(stats.reconnects, 0U);
    }
  }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;

  void add(Session session) {
    const std::scoped_lock lock{mutex_};
    sessions_.push_back(std::move(session));
    changed_.notify_all();
  }
  /// Returns when `more` requests have come out exact from now on, or one has not.
  AssertionResult goes_on(std::uint64_t more) {
    std::unique_lock lock{mutex_};
    const std::uint64_t target = requests_ + more;
    // Each request has a deadline, so that this ends.
    changed_.wait(lock, [&] { return requests_ >= target || !result_; });
    return result_;
  }
  [[nodiscard]] std::uint64_t requests() {
    const std::scoped_lock lock{mutex_};
    return requests_;
  }

 private:
  void run(const std::stop_token& stop) {
    for (std::uint64_t room = 1; !stop.stop_requested(); ++room) {
      DecodeRank* decode = nullptr;
      GroupId group{};
      {
        std::unique_lock lock{mutex_};
        if (!changed_.wait(lock, stop, [&] { return !sessions_.empty(); })) return;
        const Session& session = sessions_[room % sessions_.size()];
        decode = session.decode.get();
        group = session.group;
      }
      AssertionResult result = request(*decode, group, room);
      const std::scoped_lock lock{mutex_};
      requests_ += result ? 1 : 0;
      result_ = result;
      changed_.notify_all();
      if (!result) return;
    }
  }

  AssertionResult request(DecodeRank& decode, GroupId group, std::uint64_t room) {
    const auto failed = [&] { return AssertionFailure() << "request " << room << ": "; };
    const FaultRequest made = cluster_.request(room, 5);
    cluster_.publish(made);
    const auto pull =
        decode.pull({.group = group, .room = made.room, .pages = made.to, .deadline = 20s});
    if (!pull) return failed() << pull.error().message;
    const auto event = FaultCluster::next<PullEvent>(decode, 30s);
    if (!event) return failed() << "no event";
    if (!event->status) return failed() << event->status.error().message;
    if (auto exact = cluster_.exact(made); !exact) return failed() << exact.message();
    for (const auto& prefill : cluster_.prefills) {
      const auto ended = FaultCluster::next<RoomEvent>(*prefill, 30s);
      if (!ended || ended->room != made.room) return failed() << "the room did not end";
      if (!ended->status) return failed() << ended->status.error().message;
    }
    cluster_.free(made);
    return AssertionSuccess();
  }

  FaultCluster& cluster_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<Session> sessions_;
  std::uint64_t requests_{0};
  AssertionResult result_{AssertionSuccess()};
  std::jthread thread_;
};

class RegistrySoakTest : public ::testing::TestWithParam<RegistryKind> {
 protected:
  void SetUp() override {
    service_ = GetParam().start(kTimeToLive);
    if (!service_) GTEST_SKIP() << GetParam().name << " is not installed (scripts/setup.sh does)";
    registry_ = service_->connect();
    set_log_level(LogLevel::off);  // outages are warned of, as they should
  }
  void TearDown() override { set_log_level(LogLevel::warning); }

  /// A decode rank that knows nothing but the registry's address and the group's name.
  [[nodiscard]] Result<GroupSpec> find(const char* group, std::chrono::milliseconds timeout) const {
    return wait_for_group(*service_->connect(), group, timeout);
  }
  static Session connect(FaultCluster& cluster, const GroupSpec& group) {
    Session session{.decode = cluster.make_decode(nullptr).value(), .group{}};
    const auto connected = session.decode->connect(group, kResumeLimit);
    EXPECT_TRUE(connected) << connected.error().message;
    session.group = connected.value_or(GroupId{});
    return session;
  }
  [[nodiscard]] std::future<Result<std::unique_ptr<Announcement>>> announce_soon(
      RankAnnouncement rank) const {
    return std::async(std::launch::async, [this, rank = std::move(rank)] {
      return Announcement::start(*registry_, rank, kRegistryLimit);
    });
  }

  std::unique_ptr<RegistryService> service_;
  std::unique_ptr<Registry> registry_;  // of the prefill ranks
};

// acceptance 45: the registry dies and comes back in the midst of traffic
TEST_P(RegistrySoakTest, SessionsDoNotNoticeThatItIsLostAndNewOnesResumeWithinSeconds) {
  FaultCluster cluster{setup_of("steady", 2)};
  std::vector<std::unique_ptr<Announcement>> steady;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    cluster.prefills.push_back(cluster.make_prefill(rank).value());
    steady.push_back(
        Announcement::start(*registry_, cluster.prefills[rank]->announcement(), kRegistryLimit)
            .value());
  }
  // One whose process is started anew in each outage.
  FaultCluster other{setup_of("restarted", 1)};
  other.prefills.push_back(other.make_prefill(0).value());
  auto restarted =
      Announcement::start(*registry_, other.prefills[0]->announcement(), kRegistryLimit).value();

  const auto first = find("steady", kRegistryLimit);
  ASSERT_TRUE(first) << first.error().message;
  const auto began = std::chrono::steady_clock::now();
  {
    Soak soak{cluster, connect(cluster, *first)};
    ASSERT_TRUE(soak.goes_on(kRequestsPerPhase));

    for (std::uint64_t round = 1; round <= 3; ++round) {
      service_->kill();
      const auto killed = std::chrono::steady_clock::now();
      const auto nothing = find("steady", 200ms);
      EXPECT_LT(ms_since(killed), 10'000);
      ASSERT_FALSE(nothing);
      EXPECT_EQ(nothing.error().code, ErrorCode::deadline_exceeded);
      EXPECT_TRUE(testing::holds(nothing.error().message, {"'steady' not found", "refused"}))
          << nothing.error().message;

      auto waiting = std::async(std::launch::async, [&] { return find("steady", kRegistryLimit); });
      restarted.reset();
      other.prefills[0] = other.make_prefill(0).value();
      auto announcing = announce_soon(other.prefills[0]->announcement());
      ASSERT_TRUE(soak.goes_on(kRequestsPerPhase));
      for (const auto& rank : steady) EXPECT_TRUE(eventually([&] { return !rank->status().ok(); }));

      service_->start_again();
      const auto back = std::chrono::steady_clock::now();
      const auto found = waiting.get();
      ASSERT_TRUE(found) << found.error().message;
      EXPECT_EQ(found->members.size(), 2U);
      soak.add(connect(cluster, *found));
      const auto waited_ms = ms_since(back);

      auto announced = announcing.get();
      ASSERT_TRUE(announced) << announced.error().message;
      restarted = std::move(announced).value();
      const auto found_restarted = find("restarted", kRegistryLimit);
      ASSERT_TRUE(found_restarted) << found_restarted.error().message;
      EXPECT_EQ(found_restarted->members, std::vector{other.prefills[0]->member()});
      Session session = connect(other, *found_restarted);
      other.decode = std::move(session.decode);
      other.expect_works(session.group, round);
      const auto restarted_ms = ms_since(back);

      // One that comes only now.
      const auto late = find("steady", kRegistryLimit);
      ASSERT_TRUE(late) << late.error().message;
      soak.add(connect(cluster, *late));
      EXPECT_LT(ms_since(back), std::chrono::milliseconds{kResumeLimit}.count());
      ASSERT_TRUE(soak.goes_on(kRequestsPerPhase));
      for (const auto& rank : steady) EXPECT_TRUE(eventually([&] { return rank->status().ok(); }));
      std::cout << "round " << round << ": away for " << ms_since(killed) - ms_since(back)
                << " ms; connected " << waited_ms << " ms after, to the restarted rank "
                << restarted_ms << " ms after\n";
    }
    const auto took_ms = std::max<std::int64_t>(ms_since(began), 1);
    std::cout << soak.requests() << " requests in " << took_ms << " ms\n";
  }
  EXPECT_TRUE(cluster.canaries());
  for (const auto& prefill : cluster.prefills) {
    const PrefillStats stats = prefill->stats();
    EXPECT_EQ(stats.rooms_failed + stats.pulls_failed, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Registries, RegistrySoakTest, kRegistries, registry_name);

}  // namespace
}  // namespace kvshard::test
