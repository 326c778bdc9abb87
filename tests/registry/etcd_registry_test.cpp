#include <gtest/gtest.h>

#include <thread>

#include "kvshard/log.hpp"
#include "registry/etcd_json.hpp"
#include "registry/rank_json.hpp"
#include "support/etcd_cluster.hpp"
#include "support/registry_examples.hpp"

// What etcd does beyond what every registry does.
namespace kvshard::testing {
namespace {

constexpr const char* kPrefix = "/kvshard/";

class EtcdRegistryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!etcd_is_installed()) GTEST_SKIP() << "etcd is not installed (scripts/setup.sh does)";
    cluster_.emplace();
    registry_ = connect();
  }
  [[nodiscard]] std::unique_ptr<Registry> connect(const std::string& before = {}) const {
    return make_etcd_registry(before + cluster_->endpoints()).value();
  }
  [[nodiscard]] std::size_t listed() const {
    const auto ranks = registry_->ranks("models/llama", kRegistryLimit);
    EXPECT_TRUE(ranks) << ranks.error().message;
    return ranks ? ranks.value().size() : 0;
  }
  [[nodiscard]] std::int64_t lease_of(const RankAnnouncement& rank) const {
    const auto body = etcd::Txn{}.read({etcd::rank_key(kPrefix, rank), {}}).body();
    const auto answer = etcd::decode_txn(cluster_->ask("/v3/kv/txn", body));
    EXPECT_TRUE(answer && answer.value().entries.size() == 1);
    return answer ? answer.value().entries.at(0).lease : 0;
  }
  void put(const std::string& key, const std::string& value) const {
    const auto answer =
        etcd::decode_txn(cluster_->ask("/v3/kv/txn", etcd::Txn{}.put(key, value, 0).body()));
    EXPECT_TRUE(answer && answer.value().succeeded);
  }

  std::optional<EtcdCluster> cluster_;
  std::unique_ptr<Registry> registry_;
};

TEST_F(EtcdRegistryTest, ARenewalGoesOnUnderTheLeaseThatTheKeySaysWhoeverRenews) {
  const auto rank = make_rank(0, 1);
  ASSERT_TRUE(registry_->announce(rank, kRegistryLimit));
  const auto lease = lease_of(rank);
  EXPECT_NE(lease, 0);
  registry_ = connect();  // as after a restart
  const auto renewed = registry_->renew(rank, kRegistryLimit);
  ASSERT_TRUE(renewed) << renewed.error().message;
  EXPECT_EQ(renewed.value(), 10s);
  EXPECT_EQ(lease_of(rank), lease);
}

TEST_F(EtcdRegistryTest, ARankWhoseLeaseIsLostIsListedUnderANewOne) {
  const auto rank = make_rank(0, 1);
  ASSERT_TRUE(registry_->announce(rank, kRegistryLimit));
  const auto lease = lease_of(rank);
  (void)cluster_->ask("/v3/lease/revoke", etcd::encode_keep_alive(lease));
  EXPECT_EQ(listed(), 0U);
  ASSERT_TRUE(registry_->renew(rank, kRegistryLimit));
  EXPECT_EQ(listed(), 1U);
  EXPECT_NE(lease_of(rank), lease);
  // A key that somebody wrote without a lease would stay for ever.
  put(etcd::rank_key(kPrefix, rank), encode_rank(rank));
  EXPECT_EQ(lease_of(rank), 0);
  ASSERT_TRUE(registry_->renew(rank, kRegistryLimit));
  EXPECT_NE(lease_of(rank), 0);
}

TEST_F(EtcdRegistryTest, ARankIsListedAgainAfterTheLossOfAllData) {
  set_log_level(LogLevel::off);
  {
    const auto rank = Announcement::start(
        *(registry_ = make_etcd_registry(cluster_->endpoints(), {.time_to_live = 1s}).value()),
        make_rank(0, 1), kRegistryLimit);
    ASSERT_TRUE(rank) << rank.error().message;
    cluster_->kill();
    EXPECT_TRUE(eventually([&] { return !rank.value()->status().ok(); }));
    cluster_->forget();
    EXPECT_TRUE(wait_for_group(*registry_, "models/llama", 10s));
    EXPECT_TRUE(eventually([&] { return rank.value()->status().ok(); }));
  }
  set_log_level(LogLevel::warning);
}

TEST_F(EtcdRegistryTest, PrefixesKeepFleetsApart) {
  const auto prod = make_registry("etcd://" + cluster_->endpoints() + "/prod").value();
  ASSERT_TRUE(prod->announce(make_rank(0, 1), kRegistryLimit));
  EXPECT_EQ(listed(), 0U);
  const auto same = make_etcd_registry(cluster_->endpoints(), {.key_prefix = "/prod/"}).value();
  EXPECT_EQ(same->ranks("models/llama", kRegistryLimit).value().size(), 1U);
}

// acceptance 45: garbage
TEST_F(EtcdRegistryTest, GarbageUnderAKeyIsNamedAndHarmsNobodyWhoIsListed) {
  ASSERT_TRUE(registry_->announce(make_rank(1, 3), kRegistryLimit));
  put("/kvshard/models/llama@1/0", "garbage");
  const auto ranks = registry_->ranks("models/llama", kRegistryLimit);
  const auto late = registry_->announce(make_rank(2, 3), kRegistryLimit);
  for (const auto& error : {ranks.error(), late.error()}) {
    EXPECT_EQ(error.code, ErrorCode::unavailable);
    EXPECT_TRUE(holds(error.message, {"/kvshard/models/llama@1/0"})) << error.message;
  }
  EXPECT_TRUE(registry_->renew(make_rank(1, 3), kRegistryLimit));
  EXPECT_TRUE(registry_->renew(make_rank(0, 3), kRegistryLimit)) << "its place is written over";
  EXPECT_EQ(listed(), 2U);
}

// acceptance 45: dead, silent and senseless members
TEST_F(EtcdRegistryTest, AMemberThatGivesNoAnswerIsPassedOver) {
  std::uint16_t dead_port = 0;
  { dead_port = RawListener{}.port(); }
  const RawListener silent;
  const auto senseless = http::Server::start({"127.0.0.1", 0}, [](const http::Request&) {
    return http::Response{200, "text/html", "<html>welcome</html>"};
  });
  ASSERT_TRUE(senseless);
  for (const std::uint16_t port : {dead_port, silent.port(), senseless.value()->address().port}) {
    const auto registry = connect("127.0.0.1:" + std::to_string(port) + ",");
    const auto ranks = registry->ranks("models/llama", 1s);  // half of it for the silent one
    ASSERT_TRUE(ranks) << ranks.error().message;
    // From now on it is not asked first.
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE(registry->announce(make_rank(0, 1), kRegistryLimit));
    EXPECT_LT(std::chrono::steady_clock::now() - start, kRegistryLimit / 2);
  }
}

TEST_F(EtcdRegistryTest, WhenNoMemberAnswersEachIsNamed) {
  std::uint16_t dead_port = 0;
  { dead_port = RawListener{}.port(); }
  const RawListener silent;
  const auto dead = "127.0.0.1:" + std::to_string(dead_port);
  const auto hung = "127.0.0.1:" + std::to_string(silent.port());
  const auto registry = make_etcd_registry(dead + "," + hung).value();
  const auto start = std::chrono::steady_clock::now();
  const auto ranks = registry->ranks("g", 200ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  ASSERT_FALSE(ranks);
  EXPECT_EQ(ranks.error().code, ErrorCode::deadline_exceeded);
  EXPECT_TRUE(holds(ranks.error().message, {dead.c_str(), hung.c_str(), "refused", "in time"}))
      << ranks.error().message;
}

TEST(EtcdClusterTest, CallsGoOnWhenTheMemberInUseIsKilledAndEndInTimeWithoutAMajority) {
  if (!etcd_is_installed()) GTEST_SKIP() << "etcd is not installed (scripts/setup.sh does)";
  set_log_level(LogLevel::off);
  EtcdCluster cluster{3};
  const auto registry = make_etcd_registry(cluster.endpoints()).value();
  {
    const auto rank = Announcement::start(*registry, make_rank(0, 1), kRegistryLimit);
    ASSERT_TRUE(rank) << rank.error().message;
    cluster.kill(0);  // the first is asked first; it may be the leader, and then one is elected
    EXPECT_TRUE(wait_for_group(*registry, "models/llama", kRegistryLimit));
    const auto renewed = registry->renew(make_rank(0, 1), kRegistryLimit);
    EXPECT_TRUE(renewed) << renewed.error().message;
    EXPECT_TRUE(rank.value()->status());
    cluster.kill(1);
    const auto start = std::chrono::steady_clock::now();
    const auto ranks = registry->ranks("models/llama", 300ms);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    ASSERT_FALSE(ranks);
    EXPECT_TRUE(holds(ranks.error().message, {"no answer in time", "refused"}))
        << ranks.error().message;
    cluster.start_again(0);
    EXPECT_TRUE(wait_for_group(*registry, "models/llama", kRegistryLimit));
  }
  set_log_level(LogLevel::warning);
}

}  // namespace
}  // namespace kvshard::testing
