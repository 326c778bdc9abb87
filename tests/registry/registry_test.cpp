#include "kvshard/registry.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "kvshard/log.hpp"
#include "registry/http.hpp"
#include "support/raw_peer.hpp"
#include "support/registry_examples.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using testing::holds;
using testing::make_rank;
using testing::RawListener;

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

TEST_F(RegistryTest, RefusesWhatCannotBeARankAlsoPastTheClientsOwnCheck) {
  const auto response = http::fetch(http::parse_address(server_->address()).value(),
                                    {"POST", "/v1/announce", R"({"group":"g"})"},
                                    SteadyClock::instance().now() + 10s, {});
  ASSERT_TRUE(response);
  EXPECT_EQ(response.value().status, 400);
  EXPECT_TRUE(holds(response.value().body, {"invalid_argument", "epoch"})) << response.value().body;
  EXPECT_TRUE(registry_->ranks("g", 10s).value().empty());
}

TEST_F(RegistryTest, ARefusalNamesTheRegistryAndStopsAStartAtOnce) {
  ASSERT_TRUE(registry_->announce(make_rank(0, 2), 10s));
  const auto refused = Announcement::start(*registry_, make_rank(1, 3), 1h);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::failed_precondition);
  EXPECT_TRUE(holds(refused.error().message, {server_->address().c_str(), "shard_size"}))
      << refused.error().message;
}

TEST(RegistryServerTest, RefusesOptionsThatCannotBe) {
  EXPECT_EQ(RegistryServer::start({.time_to_live = 0ms}).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(RegistryServer::start({.host = "not an address"}).error().code, ErrorCode::unavailable);
  EXPECT_EQ(make_http_registry("nonsense").error().code, ErrorCode::invalid_argument);
}

TEST(RegistryAddressTest, SaysWhichRegistryItNames) {
  for (const char* address : {"127.0.0.1:1", "http://127.0.0.1:1/", "etcd://127.0.0.1:1",
                              "etcd://a:1,b:2,[::1]:3", "etcd://a:1/", "etcd://a:1,b:2/prod/kv/"}) {
    const auto registry = make_registry(address);
    EXPECT_TRUE(registry) << address << ": " << registry.error().message;
  }
  for (const char* address :
       {"", "nonsense", "a:0", "etcd://", "etcd://a", "etcd://a:1,", "etcd://,a:1", "etcd://a:0",
        "etcd://a:1/b c", "etcd://a:1/@", "consul://a:1", "https://a:1"}) {
    const auto registry = make_registry(address);
    ASSERT_FALSE(registry) << address;
    EXPECT_EQ(registry.error().code, ErrorCode::invalid_argument) << address;
  }
  EXPECT_EQ(make_etcd_registry("a:1", {.key_prefix = ""}).error().code,
            ErrorCode::invalid_argument);
  EXPECT_EQ(make_etcd_registry("a:1", {.time_to_live = 0s}).error().code,
            ErrorCode::invalid_argument);
}

// Both clients before what is no registry; the parameter goes before an address.
class DiscoveryTest : public ::testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Registry> connect(std::uint16_t port) {
    return make_registry(GetParam() + ("127.0.0.1:" + std::to_string(port))).value();
  }
  static std::unique_ptr<Registry> connect(const http::Server& server) {
    return connect(server.address().port);
  }
};
INSTANTIATE_TEST_SUITE_P(Clients, DiscoveryTest, ::testing::Values("http://", "etcd://"),
                         [](const auto& param) { return std::string(param.param, 4); });

// acceptance 45: nothing
TEST_P(DiscoveryTest, ADeadRegistryIsABoundedWaitAndAClearError) {
  std::uint16_t dead_port = 0;
  { dead_port = RawListener{}.port(); }
  const auto dead = connect(dead_port);
  const auto nothing = wait_for_group(*dead, "g", 60ms);
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, ErrorCode::deadline_exceeded);
  EXPECT_TRUE(holds(nothing.error().message, {"connect", std::to_string(dead_port).c_str()}))
      << nothing.error().message;
  const auto unlisted = Announcement::start(*dead, make_rank(0, 1), 60ms);
  ASSERT_FALSE(unlisted);
  EXPECT_EQ(unlisted.error().code, ErrorCode::deadline_exceeded);
}

// acceptance 45: slow
TEST_P(DiscoveryTest, ASilentRegistryHoldsUpNoCallBeyondItsTimeout) {
  const RawListener silent;
  const auto registry = connect(silent.port());
  const auto start = SteadyClock::instance().now();
  const std::array<Error, 4> errors{registry->announce(make_rank(0, 1), 50ms).error(),
                                    registry->renew(make_rank(0, 1), 50ms).error(),
                                    registry->withdraw(make_rank(0, 1), 50ms).error(),
                                    registry->ranks("g", 50ms).error()};
  EXPECT_LT(SteadyClock::instance().now() - start, 5s);
  for (const Error& error : errors) EXPECT_EQ(error.code, ErrorCode::deadline_exceeded);
}

// acceptance 45: garbage
TEST_P(DiscoveryTest, ASenselessRegistryIsAskedWithBackOffAndGivesAClearError) {
  const std::array<http::Response, 4> answers{{{502, "text/html", "<html>bad gateway</html>"},
                                               {200, "text/html", "<html>welcome</html>"},
                                               {200, "application/json", "{}"},
                                               {409, "application/json", R"({"error":[]})"}}};
  std::atomic<std::size_t> asked{0};
  const auto senseless = http::Server::start(
      {"127.0.0.1", 0}, [&](const http::Request&) { return answers[asked++ % answers.size()]; });
  ASSERT_TRUE(senseless);
  const auto registry = connect(*senseless.value());
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const auto ranks = registry->ranks("g", 10s);
    ASSERT_FALSE(ranks);
    EXPECT_EQ(ranks.error().code, ErrorCode::unavailable) << ranks.error().message;
    const auto announced = registry->announce(make_rank(0, 1), 10s);
    ASSERT_FALSE(announced);
    EXPECT_EQ(announced.error().code, ErrorCode::unavailable) << announced.error().message;
  }
  asked = 0;
  const auto garbage = wait_for_group(*registry, "g", 100ms);
  ASSERT_FALSE(garbage);
  EXPECT_EQ(garbage.error().code, ErrorCode::deadline_exceeded);
  EXPECT_GE(asked, 2U);
  EXPECT_LT(asked, 20U) << "the wait backs off";
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
    return wait_for_total(lock, renewals_ + more);
  }
  /// The first may have begun already, and if it hangs no other follows.
  bool wait_for_first_renewal() {
    std::unique_lock lock{mutex_};
    return wait_for_total(lock, 1);
  }

  milliseconds time_to_live{3};
  bool hang{false};
  std::atomic<int> withdrawals{0};

 private:
  bool wait_for_total(std::unique_lock<std::mutex>& lock, int target) {
    return changed_.wait_for(lock, 10s, [&] { return renewals_ >= target; });
  }

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
  EXPECT_TRUE(registry_.wait_for_first_renewal());
  hanging.reset();
  registry_.time_to_live = 24h;
  auto waiting = start();
  waiting.reset();
  EXPECT_EQ(registry_.withdrawals, 2);
}

}  // namespace
}  // namespace kvshard
