// Pulls from pages that are mapped, when things go wrong. That bytes arrive is for reshard_test.

#include <gtest/gtest.h>

#include "support/fault_cluster.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;

FaultSetup mapped_setup() {
  FaultSetup setup;
  setup.decode.mapped = Mapped::always;
  setup.prefill.mapped_piece_bytes = FaultSetup::kPageBytes;
  return setup;
}

std::shared_ptr<FaultPlan> hold_first(FaultPoint where) {
  return std::make_shared<FaultPlan>(
      [where, held = false](FaultPoint point, std::uint64_t) mutable {
        return point == where && !std::exchange(held, true) ? Fault{.kind = Fault::Kind::hold}
                                                            : Fault{};
      });
}

TEST(MappedTest, SaysHowBytesTravelAndTakesNoSlotForLong) {
  FaultCluster cluster{mapped_setup()};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const auto path = cluster.decode->path(group, rank);
    ASSERT_TRUE(path.ok());
    EXPECT_EQ(path->path, TransferPath::mapped) << path->reason;
    EXPECT_FALSE(path->reason.empty());
  }
  cluster.expect_works(group, 1, 40);
  EXPECT_TRUE(eventually([&] { return cluster.idle(); })) << cluster.describe();
}

// acceptance 48
TEST(MappedTest, IsRefusedWithTheReasonWhereItIsAskedForAndCannotBe) {
  FaultSetup setup = mapped_setup();
  setup.prefill.exported = false;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const auto group = cluster.decode->connect(cluster.spec(), 20s);
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::unsupported) << group.error().message;
  EXPECT_NE(group.error().message.find("does not export"), std::string::npos)
      << group.error().message;
}

// acceptance 30: the event waits for the copy that still writes our pages.
TEST(MappedTest, ARoomThatIsAbortedFailsThePullAfterItsLastCopy) {
  FaultSetup setup = mapped_setup();
  setup.decode_faults = hold_first(FaultPoint::scatter_end);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 8);
  for (auto& prefill : cluster.prefills) {
    ASSERT_TRUE(prefill->open(request.room).ok());
    ASSERT_TRUE(prefill->publish(request.room, {.pages = request.source}).ok());
  }
  ASSERT_TRUE(cluster.pull(group, request).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->abort(request.room, "test").ok());
  cluster.expect_room_ends(request.room, false);
  PullEvent event;
  EXPECT_EQ(cluster.decode->poll({&event, 1}), 0U);
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::cancelled) << status.error().message;
  cluster.free(request);
  cluster.expect_works(group, 2);
  EXPECT_TRUE(eventually([&] { return cluster.idle(); })) << cluster.describe();
}

// acceptance 33, 35: a mapping stays until its last copy is over, and a new peer is mapped anew.
TEST(MappedTest, APeerThatGoesWhileItsPagesAreReadIsMappedAnewWhenItReturns) {
  FaultSetup setup = mapped_setup();
  setup.shard_size = 1;
  setup.decode_faults = hold_first(FaultPoint::scatter);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 8);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
  cluster.prefills[0].reset();
  EXPECT_TRUE(eventually([&] { return cluster.decode->stats().peers == 0; }));
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unavailable) << status.error().message;
  cluster.free(request);
  cluster.decode->disconnect(group);
  auto again = cluster.make_prefill(0);
  ASSERT_TRUE(again.ok());
  cluster.prefills[0] = std::move(again).value();
  cluster.expect_works(cluster.connect(), 2);
}

// acceptance 27: pages that were given up while they were read are never served.
TEST(MappedTest, PagesGivenUpWhileTheyAreReadAreNeverServed) {
  FaultSetup setup = mapped_setup();
  setup.prefill.slot_timeout = 100ms;
  setup.decode_faults = hold_first(FaultPoint::scatter);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 8);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
  const auto ended = FaultCluster::next<RoomEvent>(*cluster.prefills[0]);  // its lease was poisoned
  ASSERT_TRUE(ended);
  EXPECT_FALSE(ended->status.ok());
  for (std::uint32_t i = 0; i < request.source.size(); ++i) {
    const Placement place = cluster.layout->place(request.source[i]);
    cluster.pools[place.rank]->fill(place.page, i, {.request = 99, .generation = 9});
  }
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::data_loss) << status.error().message;
  EXPECT_GE(cluster.prefills[0]->stats().late_reads + cluster.prefills[1]->stats().late_reads, 1U);
}

}  // namespace
}  // namespace kvshard::test
