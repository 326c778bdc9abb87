// Whole requests from prefill ranks to a decode rank: the same tests over loopback, over UCX between
// threads, and over UCX between processes.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <thread>

#include "support/cluster.hpp"

namespace kvshard::test {
namespace {

class SessionTest : public ::testing::TestWithParam<Where> {
 protected:
  ClusterOptions options(std::uint32_t shard_size) const {
    ClusterOptions made;
    made.where = GetParam();
    made.shard_size = shard_size;
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Over, SessionTest,
                         ::testing::Values(Where::loopback, Where::ucx_threads,
                                           Where::ucx_processes),
                         [](const auto& param) { return to_string(param.param); });

// acceptance 1
TEST_P(SessionTest, PullsEveryLengthFromEveryShardSize) {
  for (const std::uint32_t n : {1U, 2U, 3U, 4U, 8U}) {
    ClusterOptions made = options(n);
    made.pages_per_rank = 1001 / n + 2;
    made.decode_pages = 1100;
    made.geometry = small_geometry(0, 2, 1, 4, 1, 8);
    Cluster cluster{made};
    const GroupId group = cluster.connect();
    std::uint64_t room = 1;
    for (const std::uint32_t k : {0U, 1U, n - 1, n, n + 1, 1000U}) {
      SCOPED_TRACE(fmt::format("N={} K={}", n, k));
      cluster.run_request(group, RoomId{room++}, k);
      if (HasFatalFailure()) return;
    }
    cluster.expect_idle();
  }
}

// acceptance 2
TEST_P(SessionTest, FollowsARotatedChain) {
  Cluster cluster{options(4)};
  const GroupId group = cluster.connect();
  // Three single pages leave rank 3 with most free pages: the next chain has base 3.
  for (int i = 0; i < 3; ++i) (void)cluster.chain(1);
  const std::uint32_t before = cluster.allocator->free_pages(3);
  cluster.run_request(group, RoomId{7}, 10);
  EXPECT_EQ(cluster.allocator->free_pages(3), before);
  std::vector<LogicalPage> one = cluster.chain(1);
  EXPECT_EQ(cluster.layout->owner(one[0]), 3U);
  cluster.expect_idle();
}

// acceptance 3: run_request() checks that no page beyond the prompt is written.
TEST_P(SessionTest, LeavesPagesBeyondThePromptAlone) {
  Cluster cluster{options(8)};
  const GroupId group = cluster.connect();
  cluster.run_request(group, RoomId{1}, 13);
  cluster.expect_idle();
}

// acceptance 4 and 5
TEST_P(SessionTest, MovesOnlyWhatDecodeLacks) {
  Cluster cluster{options(3)};
  const GroupId group = cluster.connect();
  constexpr std::uint32_t kPages = 8;
  for (std::uint32_t c = 0; c <= kPages; ++c) {
    SCOPED_TRACE(c);
    cluster.run_request(group, RoomId{100 + c}, kPages, c);
    if (HasFatalFailure()) return;
  }
  cluster.expect_idle();
}

// acceptance 21
TEST_P(SessionTest, WaitsForARoomThatOpensLater) {
  Cluster cluster{options(2)};
  const GroupId group = cluster.connect();
  const auto source = cluster.chain(5);
  const auto to = cluster.destinations(5);
  const Content content{.request = 3, .generation = 1};
  const auto pull = cluster.decode->pull({.group = group, .room = RoomId{3}, .pages = to});
  ASSERT_TRUE(pull.ok());
  while (cluster.prefills[0]->stats().pulls_waiting + cluster.prefills[1]->stats().pulls_waiting <
         2)
    std::this_thread::yield();
  cluster.fill(source, content);
  cluster.open(RoomId{3});
  cluster.publish({.room = RoomId{3}, .pages = source, .last = true});
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok() && event->status.ok());
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(cluster.pool->holds(to[i], i, content));
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->next_event().ok());
  cluster.expect_idle();
}

// acceptance 21: the wait is bounded by the pull's own deadline.
TEST_P(SessionTest, DoesNotWaitForARoomBeyondTheDeadline) {
  ClusterOptions made = options(2);
  made.decode.heartbeat = std::chrono::milliseconds{40};
  made.prefill.heartbeat = std::chrono::milliseconds{40};
  Cluster cluster{made};
  const GroupId group = cluster.connect();
  const auto to = cluster.destinations(5);
  ASSERT_TRUE(cluster.decode
                  ->pull({.group = group,
                          .room = RoomId{3},
                          .pages = to,
                          .deadline = std::chrono::milliseconds{100}})
                  .ok());
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok());
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::deadline_exceeded);
  for (const LocalPage page : to) EXPECT_TRUE(cluster.pool->untouched(page));
  while (cluster.prefills[0]->stats().pulls_waiting + cluster.prefills[1]->stats().pulls_waiting >
         0)
    std::this_thread::yield();
  cluster.expect_idle();
}

// acceptance 22: ragged chunks; the data of chunk i moves before chunk i+1 is published.
TEST_P(SessionTest, StreamsRaggedChunks) {
  Cluster cluster{options(3)};
  const GroupId group = cluster.connect();
  constexpr std::uint32_t kPages = 23;
  const auto source = cluster.chain(kPages);
  const auto to = cluster.destinations(kPages);
  const Content content{.request = 9, .generation = 2};
  cluster.open(RoomId{9});
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{9}, .pages = to}).ok());
  std::uint32_t done = 0;
  for (const std::uint32_t size : {1U, 7U, 2U, 0U, 11U, 2U}) {
    const std::vector<LogicalPage> part{source.begin() + done, source.begin() + done + size};
    cluster.fill(part, content, done);
    cluster.publish(
        {.room = RoomId{9}, .pages = part, .first_position = done, .last = done + size == kPages});
    done += size;
    const std::uint64_t bytes = std::uint64_t{done} * cluster.pool->buffers() * 128;
    while (cluster.decode->stats().bytes < bytes) std::this_thread::yield();
  }
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok() && event->status.ok());
  for (std::uint32_t i = 0; i < kPages; ++i) EXPECT_TRUE(cluster.pool->holds(to[i], i, content));
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->next_event().ok());
  cluster.expect_idle();
}

// acceptance 22: layer-wise chunks.
TEST_P(SessionTest, StreamsLayerByLayer) {
  Cluster cluster{options(2)};
  const GroupId group = cluster.connect();
  constexpr std::uint32_t kPages = 9;
  const auto source = cluster.chain(kPages);
  const auto to = cluster.destinations(kPages);
  const Content content{.request = 4, .generation = 1};
  cluster.fill(source, content);
  cluster.open(RoomId{4});
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{4}, .pages = to}).ok());
  for (const std::uint32_t layer : {2U, 0U, 1U}) {
    cluster.publish({.room = RoomId{4},
                     .pages = source,
                     .first_layer = layer,
                     .layer_count = 1,
                     .last = layer == 1});
  }
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok() && event->status.ok()) << (event ? event->status.error().message : "");
  for (std::uint32_t i = 0; i < kPages; ++i) EXPECT_TRUE(cluster.pool->holds(to[i], i, content));
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->next_event().ok());
  cluster.expect_idle();
}

TEST_P(SessionTest, CutsPagesThatAreLargerThanASlot) {
  ClusterOptions made = options(2);
  made.prefill.slot_payload_bytes = 300;  // a page of one buffer has 128 bytes, of all six 768
  made.decode.landing_payload_bytes = 260;
  made.prefill.checksum = true;
  Cluster cluster{made};
  cluster.run_request(cluster.connect(), RoomId{1}, 9);
  cluster.expect_idle();
}

TEST_P(SessionTest, RunsManyRequestsAtOnce) {
  ClusterOptions made = options(4);
  made.pages_per_rank = 200;
  made.decode_pages = 700;
  made.prefill.slots = 3;
  made.decode.landing_slots = 2;
  made.prefill.slot_payload_bytes = 2048;
  Cluster cluster{made};
  const GroupId group = cluster.connect();
  constexpr std::uint32_t kRequests = 40;
  std::vector<std::vector<LocalPage>> to;
  for (std::uint64_t r = 0; r < kRequests; ++r) {
    const auto source = cluster.chain(1 + static_cast<std::uint32_t>(r % 29));
    to.push_back(cluster.destinations(static_cast<std::uint32_t>(source.size())));
    cluster.fill(source, {.request = r, .generation = 1});
    cluster.open(RoomId{r});
    cluster.publish({.room = RoomId{r}, .pages = source, .last = true});
  }
  for (std::uint64_t r = 0; r < kRequests; ++r)
    ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{r}, .pages = to[r]}).ok());
  for (std::uint32_t r = 0; r < kRequests; ++r) {
    const auto event = cluster.next_event();
    ASSERT_TRUE(event.ok() && event->status.ok());
    const auto& pages = to[index(event->room)];
    for (std::uint32_t i = 0; i < pages.size(); ++i)
      EXPECT_TRUE(
          cluster.pool->holds(pages[i], i, {.request = index(event->room), .generation = 1}));
  }
  for (auto& prefill : cluster.prefills)
    for (std::uint32_t r = 0; r < kRequests; ++r) ASSERT_TRUE(prefill->next_event().ok());
  cluster.expect_idle();
}

// acceptance 39
TEST_P(SessionTest, ManyThreadsConnectToOneGroupAndShareASession) {
  Cluster cluster{options(2)};
  const GroupSpec spec = cluster.spec();
  std::vector<GroupId> groups(16);
  {
    std::vector<std::jthread> threads;
    for (GroupId& group : groups)
      threads.emplace_back([&] {
        group = cluster.decode->connect(spec, std::chrono::seconds{20}).value_or(GroupId{});
      });
  }
  EXPECT_NE(groups[0], GroupId{});
  for (const GroupId group : groups) EXPECT_EQ(group, groups[0]);
  EXPECT_EQ(cluster.decode->stats().peers, 2U);
  for (auto& prefill : cluster.prefills) EXPECT_EQ(prefill->stats().peers, 1U);
  cluster.run_request(groups[0], RoomId{1}, 6);
}

TEST_P(SessionTest, SeveralPullersShareARoom) {
  Cluster cluster{options(2)};
  const GroupId group = cluster.connect();
  const auto source = cluster.chain(6);
  const Content content{.request = 5, .generation = 1};
  cluster.fill(source, content);
  cluster.open(RoomId{5}, 3);
  cluster.publish({.room = RoomId{5}, .pages = source, .last = true});
  for (int puller = 0; puller < 3; ++puller) {
    const auto to = cluster.destinations(6);
    ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{5}, .pages = to}).ok());
    const auto event = cluster.next_event();
    ASSERT_TRUE(event.ok() && event->status.ok());
    for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(cluster.pool->holds(to[i], i, content));
    EXPECT_EQ(cluster.prefills[0]->stats().rooms, puller < 2 ? 1U : 0U);  // freed after the last
  }
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->next_event().ok());
  cluster.expect_idle();
}

TEST_P(SessionTest, CancelEndsBothSides) {
  Cluster cluster{options(2)};
  const GroupId group = cluster.connect();
  const auto source = cluster.chain(6);
  const auto to = cluster.destinations(6);
  cluster.open(RoomId{5});
  cluster.publish({.room = RoomId{5}, .pages = {source.begin(), source.begin() + 3}});
  const auto pull = cluster.decode->pull({.group = group, .room = RoomId{5}, .pages = to});
  ASSERT_TRUE(pull.ok());
  for (auto& prefill : cluster.prefills)
    while (prefill->stats().leases == 0) std::this_thread::yield();
  cluster.decode->cancel(*pull);
  cluster.decode->cancel(*pull);
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok());
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::cancelled);
  for (auto& prefill : cluster.prefills) {
    const auto ended = prefill->next_event();
    ASSERT_TRUE(ended.ok());
    EXPECT_FALSE(ended->status.ok());
    EXPECT_FALSE(prefill->publish({.room = RoomId{5}, .pages = {}, .last = true}).ok());
  }
  cluster.run_request(group, RoomId{6}, 4);
  cluster.expect_idle();
}

TEST_P(SessionTest, AbortReachesThePuller) {
  Cluster cluster{options(3)};
  const GroupId group = cluster.connect();
  const auto to = cluster.destinations(6);
  cluster.open(RoomId{5});
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{5}, .pages = to}).ok());
  for (auto& prefill : cluster.prefills)
    while (prefill->stats().leases == 0) std::this_thread::yield();
  ASSERT_TRUE(cluster.prefills[1]->abort(RoomId{5}, "the prompt was withdrawn").ok());
  const auto event = cluster.next_event();
  ASSERT_TRUE(event.ok());
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::cancelled);
  EXPECT_NE(event->status.error().message.find("prefill rank 1: the prompt was withdrawn"),
            std::string::npos);
  for (auto& prefill : cluster.prefills) {
    const auto ended = prefill->next_event();
    ASSERT_TRUE(ended.ok());
    EXPECT_FALSE(ended->status.ok());
  }
  cluster.expect_idle();
}

TEST_P(SessionTest, RefusesAGeometryThatDiffers) {
  Cluster cluster{options(2)};
  PatternedPool other{[] {
    Geometry geometry = small_geometry(16);
    geometry.groups[0].head_bytes = 32;
    return geometry;
  }()};
  DecodeOptions decode_options;
  decode_options.pool = other.pool();
  auto decode = DecodeRank::create(
      decode_options,
      make_transport({.kind = GetParam() == Where::loopback ? TransportOptions::Kind::loopback
                                                            : TransportOptions::Kind::ucx})
          .value(),
      make_copy_engine({}).value());
  ASSERT_TRUE(decode.ok());
  const auto group = (*decode)->connect(cluster.spec(), std::chrono::seconds{20});
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::failed_precondition);
  EXPECT_NE(group.error().message.find("head_bytes"), std::string::npos) << group.error().message;
  EXPECT_NE(group.error().message.find("16"), std::string::npos) << group.error().message;
  EXPECT_NE(group.error().message.find("32"), std::string::npos) << group.error().message;
}

TEST_P(SessionTest, AStreamToHoldBackNeedsCuda) {
  Cluster cluster{options(1)};
  const GroupId group = cluster.connect();
  int somewhere = 0;
  const auto pull = cluster.decode->pull({.group = group,
                                          .room = RoomId{1},
                                          .pages = {},
                                          .stream = reinterpret_cast<StreamHandle>(&somewhere)});
  ASSERT_FALSE(pull.ok());
  EXPECT_EQ(pull.error().code, ErrorCode::unsupported) << pull.error().message;
  cluster.expect_idle();
}

// acceptance 9
TEST_P(SessionTest, RefusesAChainWhoseOwnersAreNotCyclic) {
  Cluster cluster{options(2)};
  cluster.open(RoomId{1});
  const Status status = cluster.prefills[0]->publish(
      {.room = RoomId{1}, .pages = {LogicalPage{2}, LogicalPage{3}, LogicalPage{5}}, .last = true});
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(status.error().message.find('2'), std::string::npos) << status.error().message;
}

}  // namespace
}  // namespace kvshard::test
