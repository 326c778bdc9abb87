#include "kvshard/registry.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "kvshard/log.hpp"
#include "registry/http.hpp"
#include "registry/raw_peer.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

RankAnnouncement make_rank(std::uint32_t rank, std::uint32_t size, std::uint64_t epoch = 1) {
  return {.group = "models/llama",
          .epoch = epoch,
          .shard_rank = rank,
          .shard_size = size,
          .incarnation = 100 + rank,
          .host = "127.0.0.1",
          .port = static_cast<std::uint16_t>(5000 + rank),
          .geometry_fields = {{"kv.page_size", "64"}, {"model_id", "m"}}};
}

bool holds(const std::string& text, std::initializer_list<const char*> words) {
  return std::ranges::all_of(
      words, [&](const char* word) { return text.find(word) != std::string::npos; });
}

class RegistryTest : public ::testing::Test {
 protected:
  RegistryTest() {
    auto server = RegistryServer::start({});
    EXPECT_TRUE(server.ok());
    server_ = std::move(server).value();
    registry_ = make_http_registry(server_->address()).value();
  }

  http::Response get(const std::string& target) const {
    auto response = http::fetch(http::parse_address(server_->address()).value(),
                                {"GET", target, {}}, SteadyClock::instance().now() + 10s, {});
    EXPECT_TRUE(response.ok());
    return response.value_or(http::Response{0, {}, {}});
  }

  std::unique_ptr<RegistryServer> server_;
  std::unique_ptr<Registry> registry_;
};

TEST_F(RegistryTest, AGroupIsFoundWhenItsLastRankIsThere) {
  auto first = Announcement::start(*registry_, make_rank(1, 2), 10s);
  ASSERT_TRUE(first) << first.error().message;
  Result<std::unique_ptr<Announcement>> second{std::unique_ptr<Announcement>{}};
  Result<GroupSpec> found{GroupSpec{}};
  {
    const std::jthread waiter{[&] { found = wait_for_group(*registry_, "models/llama", 30s); }};
    second = Announcement::start(*registry_, make_rank(0, 2), 10s);
  }
  ASSERT_TRUE(second) << second.error().message;
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found.value().epoch, 1U);
  ASSERT_EQ(found.value().members.size(), 2U);
  EXPECT_EQ(found.value().members[0], (GroupMember{0, "127.0.0.1", 5000, 100}));
  EXPECT_EQ(found.value().members[1], (GroupMember{1, "127.0.0.1", 5001, 101}));
}

TEST_F(RegistryTest, AnAnnouncementThatEndsWithdrawsItsRank) {
  {
    auto announcement = Announcement::start(*registry_, make_rank(0, 1), 10s);
    ASSERT_TRUE(announcement);
    EXPECT_EQ(registry_->ranks("models/llama", 10s).value().size(), 1U);
    EXPECT_TRUE(announcement.value()->status());
  }
  EXPECT_TRUE(registry_->ranks("models/llama", 10s).value().empty());
}

TEST_F(RegistryTest, AMismatchedRankIsRefusedAtOnceNamingFieldAndValues) {
  auto first = Announcement::start(*registry_, make_rank(0, 2), 10s);
  ASSERT_TRUE(first);
  auto other = make_rank(1, 2);
  other.geometry_fields[0].second = "16";
  auto second = Announcement::start(*registry_, other, 60s);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(
      holds(second.error().message, {"kv.page_size", "'64'", "'16'", server_->address().c_str()}))
      << second.error().message;
}

// acceptance 45: half a group, two epochs
TEST_F(RegistryTest, AWaitForAHalfGroupIsBoundedAndSaysWhatIsMissing) {
  ASSERT_TRUE(registry_->announce(make_rank(0, 3, 8), 10s));
  ASSERT_TRUE(registry_->announce(make_rank(1, 2, 9), 10s));
  const auto found = wait_for_group(*registry_, "models/llama", 60ms);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::deadline_exceeded);
  EXPECT_TRUE(holds(found.error().message, {"epoch 9 has 1 of 2 ranks, missing 0",
                                            "epoch 8 has 1 of 3 ranks, missing 1, 2", "60 ms"}))
      << found.error().message;
}

TEST_F(RegistryTest, ServesPeopleAndMachines) {
  EXPECT_EQ(get("/health").body, "ok\n");
  ASSERT_TRUE(registry_->announce(make_rank(1, 2), 10s));
  EXPECT_TRUE(holds(get("/").body, {"1 ranks", "models/llama", "1 of 2", "127.0.0.1:5001"}))
      << get("/").body;
  EXPECT_TRUE(holds(get("/v1/groups").body,
                    {R"("group":"models/llama")", R"("shard_rank":1)", R"("age_ms":)"}));
  EXPECT_EQ(get("/v1/groups/other").body, R"({"ranks":[]})");
  EXPECT_EQ(get("/nowhere").status, 404);
}

TEST_F(RegistryTest, RefusesWhatCannotBeARank) {
  auto rank = make_rank(2, 2);
  const auto refused = registry_->announce(rank, 10s);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::invalid_argument);
  // Past the client's own check, the server's.
  const auto response = http::fetch(http::parse_address(server_->address()).value(),
                                    {"POST", "/v1/announce", R"({"group":"g"})"},
                                    SteadyClock::instance().now() + 10s, {});
  ASSERT_TRUE(response);
  EXPECT_EQ(response.value().status, 400);
  EXPECT_TRUE(holds(response.value().body, {"invalid_argument", "epoch"})) << response.value().body;
  EXPECT_TRUE(registry_->ranks("g", 10s).value().empty());
  EXPECT_EQ(registry_->ranks("a b", 10s).error().code, ErrorCode::invalid_argument);
}

TEST_F(RegistryTest, ARankThatAnotherProcessReplacedIsTold) {
  ASSERT_TRUE(registry_->announce(make_rank(0, 1), 10s));
  auto successor = make_rank(0, 1);
  successor.incarnation = 999;
  ASSERT_TRUE(registry_->announce(successor, 10s));
  const auto renewed = registry_->renew(make_rank(0, 1), 10s);
  ASSERT_FALSE(renewed);
  EXPECT_EQ(renewed.error().code, ErrorCode::failed_precondition);
}

TEST(RegistryServerTest, RefusesOptionsThatCannotBe) {
  EXPECT_EQ(RegistryServer::start({.time_to_live = 0ms}).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(RegistryServer::start({.host = "not an address"}).error().code, ErrorCode::unavailable);
  EXPECT_EQ(make_http_registry("nonsense").error().code, ErrorCode::invalid_argument);
}

// acceptance 45: nothing, garbage
TEST(DiscoveryTest, ADeadOrSenselessRegistryIsABoundedWaitAndAClearError) {
  std::uint16_t dead_port = 0;
  { dead_port = testing::RawListener{}.port(); }
  const auto dead = make_http_registry("127.0.0.1:" + std::to_string(dead_port)).value();
  const auto nothing = wait_for_group(*dead, "g", 60ms);
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, ErrorCode::deadline_exceeded);
  EXPECT_TRUE(holds(nothing.error().message, {"connect", std::to_string(dead_port).c_str()}))
      << nothing.error().message;
  const auto unlisted = Announcement::start(*dead, make_rank(0, 1), 60ms);
  ASSERT_FALSE(unlisted);
  EXPECT_EQ(unlisted.error().code, ErrorCode::deadline_exceeded);

  std::atomic<int> asked{0};
  const auto senseless = http::Server::start({"127.0.0.1", 0}, [&](const http::Request&) {
    return ++asked % 2 == 0 ? http::Response{200, "text/html", "<html>welcome</html>"}
                            : http::Response{502, "text/html", "<html>bad gateway</html>"};
  });
  ASSERT_TRUE(senseless);
  const auto registry = make_http_registry(http::to_string(senseless.value()->address())).value();
  const auto garbage = wait_for_group(*registry, "g", 100ms);
  ASSERT_FALSE(garbage);
  EXPECT_EQ(garbage.error().code, ErrorCode::deadline_exceeded);
  EXPECT_GE(asked, 2);
  EXPECT_LT(asked, 20) << "the wait backs off";
}

TEST(DiscoveryTest, AStopRequestEndsTheWait) {
  auto server = RegistryServer::start({});
  ASSERT_TRUE(server);
  const auto registry = make_http_registry(server.value()->address()).value();
  std::stop_source source;
  source.request_stop();
  const auto found = wait_for_group(*registry, "g", 1h, source.get_token());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::cancelled);
}

// A registry whose answers a test writes.
class ScriptedRegistry final : public Registry {
 public:
  Result<milliseconds> announce(const RankAnnouncement&, milliseconds, std::stop_token) override {
    return time_to_live;
  }
  Result<milliseconds> renew(const RankAnnouncement&, milliseconds, std::stop_token stop) override {
    std::unique_lock lock{mutex_};
    ++renewals_;
    changed_.notify_all();
    if (hang) changed_.wait(lock, stop, [] { return false; });
    if (failure_) return *failure_;
    return time_to_live;
  }
  Status withdraw(const RankAnnouncement&, milliseconds, std::stop_token) override {
    ++withdrawals;
    return {};
  }
  Result<std::vector<RankAnnouncement>> ranks(std::string_view, milliseconds,
                                              std::stop_token) override {
    return std::vector<RankAnnouncement>{};
  }

  void fail_with(std::optional<Error> failure) {
    const std::scoped_lock lock{mutex_};
    failure_ = std::move(failure);
  }
  /// False after ten seconds without `more` renewals.
  bool wait_for_renewals(int more) {
    std::unique_lock lock{mutex_};
    const int target = renewals_ + more;
    return changed_.wait_for(lock, 10s, [&] { return renewals_ >= target; });
  }

  milliseconds time_to_live{3};
  bool hang{false};
  std::atomic<int> withdrawals{0};

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<Error> failure_;
  int renewals_{0};
};

class AnnouncementTest : public ::testing::Test {
 protected:
  AnnouncementTest() { set_log_level(LogLevel::off); }
  ~AnnouncementTest() override { set_log_level(LogLevel::warning); }
  std::unique_ptr<Announcement> start() {
    return Announcement::start(registry_, make_rank(0, 1), 10s).value();
  }

  ScriptedRegistry registry_;
};

TEST_F(AnnouncementTest, RenewsUntilItEndsThenWithdrawsOnce) {
  auto announcement = start();
  EXPECT_TRUE(registry_.wait_for_renewals(5));
  EXPECT_EQ(registry_.withdrawals, 0);
  announcement.reset();
  EXPECT_EQ(registry_.withdrawals, 1);
}

TEST_F(AnnouncementTest, OutlivesAnOutage) {
  registry_.fail_with(Error{ErrorCode::unavailable, "gone"});
  const auto announcement = start();
  EXPECT_TRUE(registry_.wait_for_renewals(3));
  ASSERT_FALSE(announcement->status());
  EXPECT_EQ(announcement->status().error().message, "gone");
  registry_.fail_with(std::nullopt);
  EXPECT_TRUE(registry_.wait_for_renewals(3));
  EXPECT_TRUE(announcement->status());
}

TEST_F(AnnouncementTest, StopsRenewingWhenRefused) {
  registry_.fail_with(Error{ErrorCode::failed_precondition, "replaced"});
  const auto announcement = start();
  while (announcement->status()) std::this_thread::yield();
  EXPECT_EQ(announcement->status().error().code, ErrorCode::failed_precondition);
  registry_.fail_with(std::nullopt);
  EXPECT_FALSE(announcement->status());
}

TEST_F(AnnouncementTest, EndsWhileARenewalHangsOrIsFarAway) {
  registry_.hang = true;
  auto hanging = start();
  EXPECT_TRUE(registry_.wait_for_renewals(1));
  hanging.reset();
  registry_.time_to_live = 24h;
  auto waiting = start();
  waiting.reset();
  EXPECT_EQ(registry_.withdrawals, 2);
}

}  // namespace
}  // namespace kvshard
