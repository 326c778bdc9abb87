// Every operation of every interface is spoiled in turn; then many at random.
#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <thread>

#include "support/fault_cluster.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;
using Kind = Fault::Kind;

// One request through ranks whose n-th operation is spoiled. False when none was.
void run_with_fault(Fault fault, std::uint64_t n, bool on_prefill, bool& fired) {
  FaultSetup setup;
  setup.one_page_pieces();
  setup.prefill.heartbeat = setup.decode.heartbeat = 20ms;
  setup.prefill.peer_timeout = setup.decode.peer_timeout = 4s;
  setup.prefill.slot_timeout = 150ms;
  setup.prefill.lease = 300ms;
  setup.prefill.pull_timeout = 500ms;
  setup.decode.fetch_timeout = fault.kind == Kind::hold ? 100ms : 4'000ms;
  setup.decode.reconnect_min = 1ms;
  const auto armed = std::make_shared<std::atomic<bool>>(true);
  const auto plan = std::make_shared<FaultPlan>(
      [=](FaultPoint, std::uint64_t number) { return number == n && *armed ? fault : Fault{}; });
  (on_prefill ? setup.prefill_faults : setup.decode_faults) = plan;
  FaultCluster cluster{setup};
  if (const Status started = cluster.start(); !started) {
    EXPECT_EQ(started.error().message, "injected fault");
    fired = true;
    return;
  }
  // A probe that never ends costs the set-up deadline; the connection is made anew after it.
  if (fault.kind == Kind::hold) {
    const auto group = cluster.decode->connect(cluster.spec(), 200ms);
    if (!group) {
      EXPECT_EQ(group.error().code, ErrorCode::deadline_exceeded);
      plan->release();
    }
  }
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 5);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request, 400ms).ok());
  auto event = FaultCluster::next<PullEvent>(*cluster.decode, 1s);
  if (!event) {  // a copy into our pages that never ends: the event must wait for it
    ASSERT_EQ(fault.kind, Kind::hold);
    plan->release();
    event = FaultCluster::next<PullEvent>(*cluster.decode, 20s);
  }
  ASSERT_TRUE(event);
  if (event->status) {
    EXPECT_TRUE(cluster.exact(request));
  }
  EXPECT_TRUE(cluster.canaries());
  plan->release();
  for (auto& prefill : cluster.prefills) {
    const auto room = FaultCluster::next<RoomEvent>(*prefill);
    ASSERT_TRUE(room);
    if (event->status) {
      EXPECT_TRUE(room->status.ok()) << room->status.error().message;
    }
  }
  ASSERT_TRUE(eventually([&] { return cluster.idle(); }));
  EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 0ms));
  *armed = false;
  fired = plan->fired() > 0;
  const bool harmless =
      fault.kind == Kind::delay || fault.kind == Kind::reorder || fault.kind == Kind::duplicate;
  if (!fired || harmless) {
    EXPECT_TRUE(event->status.ok()) << event->status.error().message;
  }
  // The ranks are as good as new.
  ASSERT_TRUE(eventually([&] { return cluster.decode->stats().peers == 2; }));
  cluster.expect_works(group, 2);
}

class FaultSweepTest : public ::testing::TestWithParam<std::tuple<Kind, bool>> {};

// acceptance 36
TEST_P(FaultSweepTest, EveryOperationInTurn) {
  const auto [kind, on_prefill] = GetParam();
  std::uint64_t n = 0;
  for (bool fired = true; fired; ++n) {
    SCOPED_TRACE(fmt::format("operation {}", n));
    run_with_fault({.kind = kind, .delay = 3ms}, n, on_prefill, fired);
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(n, on_prefill ? 10U : 20U);  // the sweep saw the operations that it is about
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Kind, bool>>& which) {
  const char* const names[] = {"None", "Fail", "Delay", "Hold", "Reorder", "Duplicate"};
  return std::string{names[static_cast<int>(std::get<0>(which.param))]} +
         (std::get<1>(which.param) ? "Prefill" : "Decode");
}
INSTANTIATE_TEST_SUITE_P(Of, FaultSweepTest,
                         ::testing::Combine(::testing::Values(Kind::fail, Kind::delay, Kind::hold,
                                                              Kind::reorder, Kind::duplicate),
                                            ::testing::Bool()),
                         name_of);

// acceptance 41. KVSHARD_SOAK_REQUESTS sets the number of requests for a longer run by hand.
TEST(FaultTest, SoaksWithOneRequestInAHundredSpoiled) {
  std::uint64_t requests = kSanitized ? 10'000 : 100'000;
  if (const char* const more = std::getenv("KVSHARD_SOAK_REQUESTS"))
    requests = std::strtoull(more, nullptr, 10);
  constexpr std::uint64_t kBatch = 50;

  // About twelve operations a request: one in 1200 is spoiled.
  const auto one_in = [](std::uint64_t odds, std::uint64_t seed) {
    return std::make_shared<FaultPlan>([=, random = seed](FaultPoint point, std::uint64_t) mutable {
      random = random * 6364136223846793005U + 1442695040888963407U;
      const bool setting_up = point == FaultPoint::register_memory || point == FaultPoint::serve ||
                              point == FaultPoint::connect;
      if (setting_up || (random >> 33) % odds != 0) return Fault{};
      const Kind kinds[] = {Kind::fail, Kind::delay, Kind::reorder, Kind::duplicate};
      return Fault{.kind = kinds[random >> 62], .delay = 500us};
    });
  };
  FaultSetup setup;
  setup.pages_per_rank = 400;
  setup.decode_pages = 400;
  setup.prefill.lease = 2s;  // rooms of pulls that failed before they were asked for
  setup.prefill.heartbeat = setup.decode.heartbeat = 100ms;
  setup.prefill.max_rooms = 1'000'000;
  setup.decode.reconnect_min = 1ms;
  setup.prefill_faults = one_in(1200, 1);
  setup.decode_faults = one_in(1200, 2);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();

  ProcessUse before;
  std::uint64_t done = 0, failed = 0, cancelled = 0, rooms = 0, random = 3;
  for (std::uint64_t room = 1; room <= requests; room += kBatch) {
    if (room > requests / 5 && before.fds == 0) before = ProcessUse::now();  // caches are warm
    std::vector<FaultRequest> batch;
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      batch.push_back(cluster.request(room + i, 2));
      cluster.publish(batch.back());
    }
    std::map<RoomId, const FaultRequest*> by_room;
    for (const FaultRequest& request : batch) {
      by_room[request.room] = &request;
      const auto pull = cluster.pull(group, request);
      ASSERT_TRUE(pull.ok()) << pull.error().message;
      random = random * 6364136223846793005U + 1442695040888963407U;
      if ((random >> 33) % 200 == 0) cluster.decode->cancel(*pull);
    }
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      const auto event = FaultCluster::next<PullEvent>(*cluster.decode);
      ASSERT_TRUE(event);
      if (event->status) {
        ++done;
        ASSERT_TRUE(cluster.exact(*by_room[event->room]));
      } else {
        ++(event->status.error().code == ErrorCode::cancelled ? cancelled : failed);
        // Whoever was not asked need not wait for its lease.
        for (auto& prefill : cluster.prefills) (void)prefill->abort(event->room, "the pull failed");
      }
    }
    for (auto& prefill : cluster.prefills) {
      for (std::uint64_t i = 0; i < kBatch; ++i, ++rooms)
        ASSERT_TRUE(FaultCluster::next<RoomEvent>(*prefill));
    }
    for (const FaultRequest& request : batch) cluster.free(request);
    // A session that was lost comes back by itself.
    ASSERT_TRUE(eventually([&] { return cluster.decode->stats().peers == 2; }));
  }

  ASSERT_TRUE(eventually([&] { return cluster.idle(); }));
  const DecodeStats stats = cluster.decode->stats();
  EXPECT_EQ(stats.pulls_started, requests);
  EXPECT_EQ(stats.pulls_done, done);
  EXPECT_EQ(stats.pulls_failed, failed);
  EXPECT_EQ(stats.pulls_cancelled, cancelled);
  EXPECT_EQ(done + failed + cancelled, requests);
  EXPECT_EQ(rooms, 2 * requests);
  for (auto& prefill : cluster.prefills) {
    EXPECT_EQ(prefill->stats().rooms_opened, requests);
    EXPECT_EQ(prefill->stats().rooms_done + prefill->stats().rooms_failed, requests);
  }
  EXPECT_GT(failed, requests / 1000);
  EXPECT_GT(done, requests * 9 / 10);
  EXPECT_EQ(cluster.allocator->free_pages(0) + cluster.allocator->free_pages(1), 800U);
  EXPECT_TRUE(cluster.canaries());
  const ProcessUse after = ProcessUse::now();
  EXPECT_LE(after.fds, before.fds + 2);  // a connection may be about to close
  EXPECT_EQ(after.threads, before.threads);
  if (!kSanitized) {
    EXPECT_LT(after.resident_kib, before.resident_kib + 16 * 1024);
  }
  RecordProperty("done", static_cast<int>(done));
  RecordProperty("failed", static_cast<int>(failed));
}

}  // namespace
}  // namespace kvshard::test
