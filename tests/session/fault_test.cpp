// What goes wrong within one process, driven through the fault seams: aborts, late readers, slots taken
// back, hostile and slow peers, shutdown. Other processes are in fault_process_test.cpp.
#include <fmt/format.h>

#include <atomic>
#include <map>
#include <thread>
#include <variant>

#include "support/fault_cluster.hpp"
#include "support/fault_raw_peer.hpp"
#include "support/running_time.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;
using Kind = Fault::Kind;

constexpr Fault kHold{.kind = Kind::hold};

std::shared_ptr<FaultPlan> hold_all(FaultPoint at) {
  return std::make_shared<FaultPlan>(
      [at](FaultPoint point, std::uint64_t) { return point == at ? kHold : Fault{}; });
}

// ---- leases and slots ------------------------------------------------------------------------------

// acceptance 26
TEST(FaultTest, AReaderAfterTheLeaseNeverSucceeds) {
  ManualClock clock;
  FaultSetup setup;
  setup.on(clock);
  setup.prefill.lease = 1s;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 5);
  cluster.publish(request);
  // The lease begins when the rank takes the chunk, which may be after the first step.
  for (auto& prefill : cluster.prefills) {
    ASSERT_TRUE(eventually([&] {
      clock.advance(2s);
      return prefill->stats().rooms_failed == 1;
    }));
  }
  cluster.expect_room_ends(request.room, false);
  ASSERT_TRUE(cluster.pull(group, request).ok());
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unavailable) << status.error().message;
  EXPECT_NE(status.error().message.find("did not come within 1000 ms"), std::string::npos)
      << status.error().message;
  EXPECT_TRUE(cluster.canaries());
  EXPECT_TRUE(cluster.idle());
}

// acceptance 27. The get is under way while its slot is taken back and filled for another request. The
// prefill rank's ABORT is lost, so only stamps and COMMIT stand between the pull and success.
TEST(FaultTest, APullDoesNotSucceedWhenItsSlotIsFilledAgainUnderTheGet) {
  for (const FaultPoint point : {FaultPoint::fetch, FaultPoint::fetch_end}) {
    FaultSetup setup;
    setup.one_page_pieces().shard_size = 1;
    setup.prefill.slots = 1;
    setup.prefill.slot_timeout = 100ms;
    setup.prefill.heartbeat = 40ms;
    setup.decode_faults = FaultPlan::first(point, kHold);
    FaultCluster cluster{setup};
    ASSERT_TRUE(cluster.start().ok());
    auto proxy = ControlProxy::create("127.0.0.1", cluster.prefills[0]->member().port,
                                      [](const ProxiedFrame& f) {
                                        return f.type == 8 && !f.to_prefill ? FrameFate::drop
                                                                            : FrameFate::pass;
                                      })
                     .value();
    GroupSpec spec = cluster.spec();
    spec.members[0].port = proxy->port();
    const auto group = cluster.decode->connect(spec, 20s);
    ASSERT_TRUE(group.ok()) << group.error().message;

    const FaultRequest old = cluster.request(1, 1);
    cluster.publish(old);
    ASSERT_TRUE(cluster.pull(*group, old, 60s).ok());
    ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
    cluster.expect_room_ends(old.room, false);  // the slot was taken back, the lease with it
    EXPECT_EQ(cluster.prefills[0]->stats().late_reads, 1U);
    // Only now may its pages be used again; they and the slot serve another request.
    ASSERT_TRUE(cluster.allocator->free_chain(old.source).ok());
    cluster.expect_works(*group, 2, 1);
    setup.decode_faults->release();
    const Status status = cluster.pull_status();
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::data_loss) << status.error().message;
    EXPECT_EQ(cluster.decode->stats().stale, 1U);
    EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
  }
}

// acceptance 28. The engine does nothing at all while time passes; pulls go on in the library's threads.
TEST(FaultTest, ALeaseLivesWhileItsPullerLivesHoweverLongTheEngineSleeps) {
  ManualClock clock;
  FaultSetup setup;
  setup.on(clock);
  setup.prefill.lease = 1s;
  setup.prefill.slot_timeout = 1h;
  setup.decode_faults = hold_all(FaultPoint::scatter);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 5);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request, 1h).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(2, 20s));
  clock.advance(2s);
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  EXPECT_TRUE(status.ok()) << status.error().message;
  EXPECT_TRUE(cluster.exact(request));
  cluster.expect_room_ends(request.room, true);
}

// acceptance 29
TEST(FaultTest, PagesAreFreedAfterTheLastOfSeveralDecodeRanksAndSamples) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  auto other = cluster.make_decode(nullptr).value();
  const GroupId group = cluster.connect();
  const auto other_group = other->connect(cluster.spec(), 20s);
  ASSERT_TRUE(other_group.ok());
  const FaultRequest request = cluster.request(1, 6);
  cluster.publish(request, 4);
  for (int sample = 0; sample < 4; ++sample) {
    EXPECT_FALSE(FaultCluster::next<RoomEvent>(*cluster.prefills[0], 0ms));
    DecodeRank& decode = sample % 2 == 0 ? *cluster.decode : *other;
    ASSERT_TRUE(decode
                    .pull({.group = sample % 2 == 0 ? group : *other_group,
                           .room = request.room,
                           .pages = request.to})
                    .ok());
    const auto event = FaultCluster::next<PullEvent>(decode);
    ASSERT_TRUE(event && event->status.ok());
    EXPECT_TRUE(cluster.exact(request));
    for (const LocalPage page : request.to) cluster.pool->wipe(page);
  }
  cluster.expect_room_ends(request.room, true);
  EXPECT_TRUE(cluster.idle());
}

TEST(FaultTest, APullThatDoesNotCommitInTimeIsEnded) {
  ManualClock clock;
  FaultSetup setup;
  setup.on(clock);
  setup.prefill.pull_timeout = 10s;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 5);
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(request.room).ok());
  ASSERT_TRUE(cluster.pull(group, request, std::chrono::milliseconds::max()).ok());
  for (auto& prefill : cluster.prefills)
    ASSERT_TRUE(eventually([&] { return prefill->stats().leases == 1; }));
  clock.advance(11s);
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::deadline_exceeded) << status.error().message;
  cluster.expect_room_ends(request.room, false);
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
}

// A peer's leases wait for its share of the slots; they must go on when the lease that held the share ends
// without a RELEASE.
TEST(FaultTest, LeasesThatWaitForTheirPeersShareRunWhenItIsGivenBack) {
  FaultSetup setup;
  setup.one_page_pieces().shard_size = 1;
  setup.prefill.slots = 2;
  setup.decode_faults = FaultPlan::first(FaultPoint::fetch, kHold);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  auto other = cluster.make_decode(nullptr).value();  // two peers: a share of one slot
  ASSERT_TRUE(other->connect(cluster.spec(), 20s).ok());
  const FaultRequest first = cluster.request(1, 3);
  const FaultRequest second = cluster.request(2, 3);
  const FaultRequest third = cluster.request(3, 3);
  cluster.publish(first);
  const auto held = cluster.pull(group, first);
  ASSERT_TRUE(held.ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
  cluster.publish(second);
  cluster.publish(third);
  const auto dead = cluster.pull(group, second);
  ASSERT_TRUE(dead.ok() && cluster.pull(group, third).ok());
  ASSERT_TRUE(eventually([&] { return cluster.prefills[0]->stats().leases == 3; }));
  cluster.decode->cancel(*dead);  // parked: its place must not be what the next one waits for
  cluster.decode->cancel(*held);
  std::map<RoomId, ErrorCode> failed;
  bool done = false;
  for (int i = 0; i < 3; ++i) {
    const auto event = FaultCluster::next<PullEvent>(*cluster.decode, 10s);
    ASSERT_TRUE(event) << "a parked lease was left behind";
    if (event->status)
      done = event->room == third.room;
    else
      failed[event->room] = event->status.error().code;
  }
  EXPECT_TRUE(done);
  EXPECT_EQ(failed.size(), 2U);
  EXPECT_TRUE(cluster.exact(third));
  setup.decode_faults->release();
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
}

// ---- abort -----------------------------------------------------------------------------------------

enum class Who { decode, prefill, both };

// acceptance 30
TEST(FaultTest, EitherSideAbortsAtAnyMomentAndEachHearsItOnce) {
  struct Moment {
    const char* name;
    std::optional<FaultPoint> decode, prefill;
    bool opened, published;
  };
  const Moment moments[] = {{"before the room exists", {}, {}, false, false},
                            {"before a chunk", {}, {}, true, false},
                            {"gather not begun", {}, FaultPoint::gather, true, true},
                            {"gather not told", {}, FaultPoint::gather_end, true, true},
                            {"get not begun", FaultPoint::fetch, {}, true, true},
                            {"get not told", FaultPoint::fetch_end, {}, true, true},
                            {"scatter not begun", FaultPoint::scatter, {}, true, true},
                            {"scatter not told", FaultPoint::scatter_end, {}, true, true}};
  for (const Moment& moment : moments) {
    for (const Who who : {Who::decode, Who::prefill, Who::both}) {
      if (who != Who::decode && !moment.opened) continue;
      SCOPED_TRACE(fmt::format("{}, by {}", moment.name, static_cast<int>(who)));
      FaultSetup setup;
      if (moment.decode) setup.decode_faults = hold_all(*moment.decode);
      if (moment.prefill) setup.prefill_faults = hold_all(*moment.prefill);
      FaultCluster cluster{setup};
      ASSERT_TRUE(cluster.start().ok());
      const GroupId group = cluster.connect();
      const FaultRequest request = cluster.request(1, 6);
      if (moment.published) {
        cluster.publish(request);
      } else if (moment.opened) {
        for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(request.room).ok());
      }
      const auto pull = cluster.pull(group, request);
      ASSERT_TRUE(pull.ok());
      for (const auto& faults : {setup.decode_faults, setup.prefill_faults})
        ASSERT_TRUE(!faults || faults->wait_holding(2, 20s));
      for (auto& prefill : cluster.prefills) {
        ASSERT_TRUE(eventually([&] {
          return moment.opened ? prefill->stats().leases == 1 : prefill->stats().pulls_waiting == 1;
        }));
      }

      const RunningTime watch;
      if (who != Who::prefill) cluster.decode->cancel(*pull);
      if (who != Who::decode) {
        for (auto& prefill : cluster.prefills) (void)prefill->abort(request.room, "withdrawn");
      }
      // The event waits for copies into decode's pages, and for nothing else.
      const bool scatters =
          moment.decode == FaultPoint::scatter || moment.decode == FaultPoint::scatter_end;
      if (scatters) {
        EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 20ms));
        setup.decode_faults->release();
      }
      const Status status = cluster.pull_status();
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().code, ErrorCode::cancelled) << status.error().message;
      EXPECT_LT(watch.elapsed(), 2s);
      // From now on the pages are the engine's; nothing late may touch them.
      const Content refill{.request = 99, .generation = 2};
      for (std::uint32_t i = 0; i < request.to.size(); ++i)
        cluster.pool->fill(request.to[i], i, refill);
      if (moment.prefill) {  // pages that a gather may read are not reported
        EXPECT_FALSE(FaultCluster::next<RoomEvent>(*cluster.prefills[0], 20ms));
        setup.prefill_faults->release();
      }
      if (moment.opened) cluster.expect_room_ends(request.room, false);
      if (setup.decode_faults) setup.decode_faults->release();
      ASSERT_TRUE(eventually([&] { return cluster.idle(); }));
      for (std::uint32_t i = 0; i < request.to.size(); ++i)
        EXPECT_TRUE(cluster.pool->holds(request.to[i], i, refill));
      EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 0ms));
      for (auto& prefill : cluster.prefills)
        EXPECT_FALSE(FaultCluster::next<RoomEvent>(*prefill, 0ms));
      cluster.expect_works(group, 2);
    }
  }
}

// acceptance 30: a room does not wait for a puller that gave up before it was opened.
TEST(FaultTest, ARoomOpenedAfterItsPullerGaveUpEndsAtOnce) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 6);
  for (int sample = 0; sample < 2; ++sample) {
    const auto pull = cluster.pull(group, request);
    ASSERT_TRUE(pull.ok());
    for (auto& prefill : cluster.prefills)
      ASSERT_TRUE(eventually([&] { return prefill->stats().pulls_waiting == 1; }));
    cluster.decode->cancel(*pull);
    for (auto& prefill : cluster.prefills)
      ASSERT_TRUE(eventually([&] { return prefill->stats().pulls_waiting == 0; }));
    EXPECT_FALSE(cluster.pull_status().ok());
  }
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(request.room, 2).ok());
  cluster.expect_room_ends(request.room, false);
  EXPECT_TRUE(cluster.idle()) << cluster.describe();
}

// acceptance 30: after the end, an abort changes nothing.
TEST(FaultTest, AnAbortAfterTheEndChangesNothing) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 6);
  cluster.publish(request);
  const auto pull = cluster.pull(group, request);
  ASSERT_TRUE(pull.ok());
  EXPECT_TRUE(cluster.pull_status().ok());
  cluster.expect_room_ends(request.room, true);
  cluster.decode->cancel(*pull);
  EXPECT_FALSE(cluster.prefills[0]->abort(request.room, "too late").ok());
  cluster.expect_works(group, 2);
  EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 0ms));
  EXPECT_TRUE(cluster.exact(request));
}

// acceptance 31
TEST(FaultTest, CancelRacesCompletionAndExactlyOneEventComes) {
  constexpr std::uint64_t kPulls = kSanitized ? 10'000 : 100'000;
  constexpr std::uint64_t kBatch = 50;
  FaultSetup setup;
  setup.pages_per_rank = 400;
  setup.decode_pages = 400;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  std::uint64_t room = 1, done = 0, cancelled = 0, random = 1;
  for (std::uint64_t batch = 0; batch < kPulls / kBatch; ++batch) {
    std::vector<FaultRequest> requests;
    std::vector<PullId> pulls;
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      requests.push_back(cluster.request(room++, 2));
      cluster.publish(requests.back());
    }
    for (const FaultRequest& request : requests)
      pulls.push_back(cluster.pull(group, request).value());
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      random = random * 6364136223846793005U + 1442695040888963407U;
      if ((random >> 60) < 8) std::this_thread::yield();
      cluster.decode->cancel(pulls[(random >> 33) % kBatch]);
    }
    std::map<PullId, int> events;
    for (std::uint64_t i = 0; i < kBatch; ++i) {
      const auto event = FaultCluster::next<PullEvent>(*cluster.decode);
      ASSERT_TRUE(event);
      ++events[event->pull];
      const FaultRequest& request = requests[index(event->room) - (room - kBatch)];
      if (event->status) {
        ++done;
        ASSERT_TRUE(cluster.exact(request));
      } else {
        ++cancelled;
        ASSERT_EQ(event->status.error().code, ErrorCode::cancelled)
            << event->status.error().message;
      }
    }
    for (const PullId pull : pulls) ASSERT_EQ(events[pull], 1);
    ASSERT_TRUE(eventually([&] { return cluster.idle(); })) << cluster.describe();
    for (auto& prefill : cluster.prefills)
      while (FaultCluster::next<RoomEvent>(*prefill, 0ms)) {
      }
    for (const FaultRequest& request : requests) cluster.free(request);
  }
  EXPECT_EQ(done + cancelled, kPulls);
  EXPECT_GT(done, kPulls / 100);
  EXPECT_GT(cancelled, kPulls / 100);
  EXPECT_EQ(cluster.decode->stats().pulls_done, done);
}

// acceptance 32
TEST(FaultTest, OneRankFailsAndThePullReportsOnceAfterAllCopiesStopped) {
  FaultSetup setup;
  setup.shard_size = 4;
  std::atomic<int> scatters{0};
  setup.decode_faults = std::make_shared<FaultPlan>([&](FaultPoint point, std::uint64_t) {
    if (point == FaultPoint::fetch_end) return scatters == 0 ? Fault{} : kHold;  // slow siblings
    if (point == FaultPoint::scatter_end && ++scatters == 1) return kHold;
    return Fault{};
  });
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 16);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(1, 20s));
  for (auto& prefill : cluster.prefills)  // the PULL to another rank may still be on its way
    ASSERT_TRUE(eventually([&] { return prefill->stats().leases == 1; }));
  ASSERT_TRUE(cluster.prefills[1]->abort(request.room, "out of memory").ok());
  ASSERT_TRUE(
      eventually([&] { return cluster.prefills[2]->stats().leases == 0; }));  // told its siblings
  EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 20ms)) << "a scatter still runs";
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("prefill rank 1: out of memory"), std::string::npos)
      << status.error().message;
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
  EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 0ms));
}

// ---- hostile and slow peers ------------------------------------------------------------------------

wire::Hello hello_for(FaultCluster& cluster) {
  return {.incarnation = 7,
          .group = "kvshard",
          .epoch = 1,
          .shard_rank = 0,
          .shard_size = static_cast<std::uint32_t>(cluster.prefills.size()),
          .transport = "loopback",
          .geometry = cluster.pool->geometry(),
          .landing_payload_bytes = 1U << 20,
          .heartbeat_ms = 100};
}

// What a decode rank sends after WELCOME: all that the prefill rank holds.
wire::Assign assign_all(const FaultCluster& cluster) {
  const BufferGroup& group = cluster.pool->geometry().groups[0];
  return {.lanes = {{.layers = group.layers, .heads = group.heads}}};
}

// Two waiting pulls of one number used to leave a lease behind that pointed at a peer long gone.
TEST(FaultTest, TheSamePullNumberTwiceIsRefusedEvenWhileItWaits) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  RawPeer peer{cluster.prefills[0]->member()};
  ASSERT_TRUE(peer.send(hello_for(cluster)));
  const auto welcome = peer.receive();
  ASSERT_TRUE(welcome && welcome->first == wire::MessageType::welcome);
  const wire::Pull pull{
      .pull = 5, .room = RoomId{1}, .window = 2, .wait_ms = 60'000, .tables = {{.end_token = 16}}};
  ASSERT_TRUE(peer.send(assign_all(cluster)) && peer.send(pull) && peer.send(pull));
  const auto answer = peer.receive();
  ASSERT_TRUE(answer);
  ASSERT_EQ(answer->first, wire::MessageType::bye);
  EXPECT_NE(
      wire::decode<wire::Bye>(answer->second).value().error.message.find("pull 5 exists already"),
      std::string::npos);
  EXPECT_TRUE(eventually([&] { return cluster.prefills[0]->stats().peers == 0; }));
  EXPECT_EQ(cluster.prefills[0]->stats().pulls_waiting, 0U);
  cluster.expect_works(cluster.connect(), 1);
}

// acceptance 44: slots, generations, counts that are not the peer's own.
TEST(FaultTest, AHostilePeerLosesItsSessionAndNobodyElses) {
  using Message = std::variant<wire::Assign, wire::Pull, wire::Release, wire::Commit, wire::Ready>;
  const Message messages[] = {
      wire::Pull{.pull = 9, .room = RoomId{1}, .window = 2, .tables = {{.table = 3}}},
      wire::Pull{.pull = 9, .room = RoomId{1}, .window = 2, .tables = {{.phase = 1}}},
      wire::Pull{.pull = 9, .room = RoomId{1}, .window = 2},
      wire::Assign{.lanes = {{.layers = 3, .heads = 2}}},  // a second one
      wire::Release{.pull = 1, .slot = 4'000'000'000U},
      wire::Release{.pull = 1, .slot = 3, .generation = 12345},
      wire::Release{.pull = 1, .piece = 77, .slot = 0, .generation = 1},
      wire::Ready{.pull = 1, .last = true}};
  for (const Message& message : messages) {
    FaultSetup setup;
    FaultCluster cluster{setup};
    ASSERT_TRUE(cluster.start().ok());
    const GroupId group = cluster.connect();
    for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(RoomId{1}, 2).ok());
    RawPeer peer{cluster.prefills[0]->member()};
    ASSERT_TRUE(peer.send(hello_for(cluster)) && peer.receive());
    ASSERT_TRUE(peer.send(assign_all(cluster)));
    ASSERT_TRUE(peer.send(
        wire::Pull{.pull = 1, .room = RoomId{1}, .window = 2, .tables = {{.end_token = 16}}}));
    ASSERT_TRUE(eventually([&] { return cluster.prefills[0]->stats().leases == 1; }));
    // A message that breaks the wire's own rules cannot be encoded politely; those that can go as they are.
    std::visit([&](const auto& rude) { ASSERT_TRUE(peer.send(rude)); }, message);
    bool closed = false;
    while (const auto frame = peer.receive()) closed = frame->first == wire::MessageType::bye;
    EXPECT_TRUE(closed);
    ASSERT_TRUE(eventually([&] { return cluster.prefills[0]->stats().leases == 0; }));
    EXPECT_EQ(cluster.prefills[0]->stats().peers, 1U);
    cluster.expect_works(group, 2);
  }
}

// The first message that says what of the pool a peer wants, from a peer that may ask: acceptance 44
TEST(FaultTest, AnAssignmentOutsideThePoolIsRefused) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  constexpr std::uint32_t kHuge = 4'294'967'295U;
  const std::vector<Lane> lanes[] = {
      {{.group = 7, .layers = 3, .heads = 2}},
      {{.group = kHuge, .layers = 3, .heads = 2}},
      {{.layers = 4, .heads = 2}},
      {{.first_layer = 1, .layers = kHuge, .heads = 2}},
      {{.first_layer = kHuge, .layers = 1, .heads = 2}},
      {{.layers = 3, .heads = 3}},
      {{.layers = 3, .first_head = kHuge, .heads = 2}},
      {{.layers = 3, .first_head = 1, .heads = kHuge}},
      {{.layers = 0, .heads = 2}},
      {{.layers = 3, .heads = 0}},
      {{.layers = 3, .heads = 2}, {.layers = 3, .heads = 2}}};  // the same twice
  for (const std::vector<Lane>& wrong : lanes) {
    const std::uint64_t refused = cluster.prefills[0]->stats().peers_refused;
    RawPeer peer{cluster.prefills[0]->member()};
    ASSERT_TRUE(peer.send(hello_for(cluster)) && peer.receive());
    ASSERT_TRUE(peer.send(wire::Assign{.lanes = wrong}));
    const auto answer = peer.receive();
    ASSERT_TRUE(answer && answer->first == wire::MessageType::bye)
        << wrong[0].group << " " << wrong[0].first_layer << " " << wrong[0].layers << " "
        << wrong[0].first_head << " " << wrong[0].heads;
    EXPECT_EQ(cluster.prefills[0]->stats().peers_refused, refused + 1);
  }
  cluster.expect_works(group, 2);
}

// Commits that nobody can have earned are answered, never believed.
TEST(FaultTest, ACommitOfSomethingElseIsStale) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  ASSERT_TRUE(cluster.prefills[0]->open(RoomId{1}).ok());
  ASSERT_TRUE(cluster.prefills[0]->publish(RoomId{1}, {.pages = {}, .last = true}).ok());
  RawPeer peer{cluster.prefills[0]->member()};
  ASSERT_TRUE(peer.send(hello_for(cluster)) && peer.receive());
  ASSERT_TRUE(peer.send(assign_all(cluster)));
  ASSERT_TRUE(
      peer.send(wire::Pull{.pull = 1, .room = RoomId{1}, .window = 2, .tables = {{.table = 0}}}));
  const auto ready = peer.receive();
  ASSERT_TRUE(ready && ready->first == wire::MessageType::ready);
  for (const std::uint64_t pull :
       {1U, 1U, 2U}) {  // a wrong digest, a lease that has ended, none at all
    ASSERT_TRUE(peer.send(wire::Commit{.pull = pull, .pieces = 0, .digest = 1}));
    const auto verdict = peer.receive();
    ASSERT_TRUE(verdict && verdict->first == wire::MessageType::verdict);
    EXPECT_FALSE(wire::decode<wire::Verdict>(verdict->second).value().valid);
  }
  EXPECT_EQ(cluster.prefills[0]->stats().stale_commits, 3U);
  const auto event = FaultCluster::next<RoomEvent>(*cluster.prefills[0]);
  ASSERT_TRUE(event);
  EXPECT_FALSE(event->status.ok());
}

TEST(FaultTest, APeerThatHangsDoesNotTakeEveryLandingSlot) {
  FaultSetup setup;
  setup.one_page_pieces().shard_size = 1;
  setup.decode.landing_slots = 4;
  setup.decode.window = 8;
  // The hung group's share is two of the four; its first two gets never end.
  setup.decode_faults =
      std::make_shared<FaultPlan>([held = 0](FaultPoint point, std::uint64_t) mutable {
        return point == FaultPoint::fetch && held++ < 2 ? kHold : Fault{};
      });
  setup.prefill.group = "hung";
  FaultCluster hung{setup};
  ASSERT_TRUE(hung.start().ok());
  FaultSetup other_setup = setup;
  other_setup.decode_faults = nullptr;
  other_setup.prefill.group = "other";
  FaultCluster other{other_setup};
  ASSERT_TRUE(other.start().ok());
  const GroupId hung_group = hung.connect();
  const auto other_group = hung.decode->connect(other.spec(), 20s);
  ASSERT_TRUE(other_group.ok());

  const FaultRequest stuck = hung.request(1, 12);
  hung.publish(stuck);
  ASSERT_TRUE(hung.pull(hung_group, stuck, 60s).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(2, 20s));
  EXPECT_EQ(hung.decode->stats().landing_in_use, 2U);
  FaultRequest request = other.request(2, 12);
  request.to = hung.request(2, 12).to;
  other.publish(request);
  ASSERT_TRUE(hung.pull(*other_group, request).ok());
  const auto event = FaultCluster::next<PullEvent>(*hung.decode, 3s);
  ASSERT_TRUE(event) << "the other group's pull was starved";
  EXPECT_EQ(event->room, request.room);
  EXPECT_TRUE(event->status.ok());
  EXPECT_TRUE(hung.exact(request));
  setup.decode_faults->release();
  EXPECT_TRUE(hung.pull_status().ok());
}

// acceptance 38
TEST(FaultTest, AThousandPullsThroughOneSlotEndInOrder) {
  FaultSetup setup;
  setup.one_page_pieces().shard_size = 1;
  setup.pages_per_rank = setup.decode_pages = 1100;
  setup.prefill.slots = setup.decode.landing_slots = setup.decode.window = 1;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  std::vector<FaultRequest> requests;
  for (std::uint64_t room = 1; room <= 1000; ++room) {
    requests.push_back(cluster.request(room, 1));
    cluster.publish(requests.back());
  }
  for (const FaultRequest& request : requests) ASSERT_TRUE(cluster.pull(group, request).ok());
  for (const FaultRequest& request : requests) {
    const auto event = FaultCluster::next<PullEvent>(*cluster.decode);
    ASSERT_TRUE(event && event->status.ok());
    ASSERT_EQ(event->room, request.room);
    ASSERT_TRUE(cluster.exact(request));
  }
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
}

TEST(FaultTest, CapsAreAnsweredWithResourceExhausted) {
  FaultSetup setup;
  setup.prefill.max_rooms = 2;
  setup.prefill.limits.max_pulls_per_peer = 3;
  setup.decode.max_pulls = 5;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  EXPECT_TRUE(cluster.prefills[0]->open(RoomId{100}).ok() &&
              cluster.prefills[0]->open(RoomId{101}).ok());
  EXPECT_EQ(cluster.prefills[0]->open(RoomId{102}).error().code, ErrorCode::resource_exhausted);
  const FaultRequest request = cluster.request(1, 2);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(cluster.pull(group, request).ok());
  const Status status = cluster.pull_status();  // the fourth waits for its room once too often
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::resource_exhausted) << status.error().message;
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(cluster.pull(group, request).ok());
  EXPECT_EQ(cluster.pull_status().error().code, ErrorCode::resource_exhausted);
  EXPECT_EQ(cluster.pull_status().error().code, ErrorCode::resource_exhausted);
}

TEST(FaultTest, RefusesTimesThatCannotWork) {
  for (const auto change :
       {+[](FaultSetup& s) { s.prefill.heartbeat = 0ms; },
        +[](FaultSetup& s) { s.prefill.heartbeat = s.prefill.peer_timeout; },
        +[](FaultSetup& s) { s.prefill.lease = -1ms; },
        +[](FaultSetup& s) { s.decode.reconnect_min = 0ms; },
        +[](FaultSetup& s) { s.decode.fetch_timeout = std::chrono::milliseconds::max(); },
        +[](FaultSetup& s) { s.prefill.busy_poll = -1us; },
        +[](FaultSetup& s) { s.decode.busy_poll = std::chrono::microseconds::max(); }}) {
    FaultSetup setup;
    change(setup);
    FaultCluster refused{setup};
    const Status status = refused.start();
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  }
  FaultSetup setup;  // each side is right by itself, but not together
  setup.decode.heartbeat = 3s;
  setup.prefill.heartbeat = 500ms;
  setup.prefill.peer_timeout = 2s;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const auto group = cluster.decode->connect(cluster.spec(), 20s);
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::failed_precondition);
  EXPECT_NE(group.error().message.find("3000 ms, prefill waits 2000 ms"), std::string::npos)
      << group.error().message;
}

// acceptance 35: another process at the same address is not the one that was meant.
TEST(FaultTest, AnotherIncarnationAtTheAddressIsRefusedNamingBoth) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  GroupSpec spec = cluster.spec();
  spec.members[1].incarnation ^= 2;
  const auto group = cluster.decode->connect(spec, 20s);
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::failed_precondition);
  EXPECT_NE(group.error().message.find(fmt::format("incarnation: decode wants {}, prefill has {}",
                                                   spec.members[1].incarnation,
                                                   spec.members[1].incarnation ^ 2)),
            std::string::npos)
      << group.error().message;
  cluster.expect_works(cluster.connect(), 1);
}

// ---- network ---------------------------------------------------------------------------------------

// acceptance 34: the cable is cut, nothing closes; later it is put back.
TEST(FaultTest, ASilentNetworkIsNoticedAndRecovers) {
  FaultSetup setup;
  setup.prefill.heartbeat = setup.decode.heartbeat = 50ms;
  setup.prefill.peer_timeout = setup.decode.peer_timeout = 1s;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  auto proxy = ControlProxy::create("127.0.0.1", cluster.prefills[1]->member().port).value();
  GroupSpec spec = cluster.spec();
  spec.members[1].port = proxy->port();
  const auto group = cluster.decode->connect(spec, 20s);
  ASSERT_TRUE(group.ok());
  cluster.expect_works(*group, 1);

  const FaultRequest request = cluster.request(2, 5);
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(request.room).ok());
  ASSERT_TRUE(cluster.pull(*group, request).ok());
  for (auto& prefill : cluster.prefills)
    ASSERT_TRUE(eventually([&] { return prefill->stats().leases == 1; }));
  const RunningTime watch;
  proxy->set_silent(true);
  const Status status = cluster.pull_status();
  const auto took = watch.elapsed();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unavailable) << status.error().message;
  EXPECT_LT(took, setup.decode.peer_timeout + 1s);
  cluster.expect_room_ends(request.room, false);
  proxy->set_silent(false);
  ASSERT_TRUE(eventually([&] { return cluster.decode->stats().peers == 2; }));
  cluster.expect_works(*group, 3);
  EXPECT_EQ(cluster.decode->stats().reconnects, 1U);
}

// A stalled machine: no rank runs, and time passes. Whoever wakes has heard nothing for longer than a peer may be
// silent, in the middle of a fetch.
TEST(FaultTest, AStandstillOfBothSidesIsNobodysSilence) {
  ManualClock clock;
  FaultSetup setup;
  setup.on(clock);
  setup.prefill.peer_timeout = setup.decode.peer_timeout = setup.decode.fetch_timeout = 4s;
  setup.prefill.lease = 10s;
  setup.prefill.slot_timeout = setup.prefill.pull_timeout = 1h;
  setup.decode_faults = hold_all(FaultPoint::fetch);
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest held = cluster.request(1, 5);
  cluster.publish(held);
  ASSERT_TRUE(cluster.pull(group, held, 1h).ok());
  ASSERT_TRUE(setup.decode_faults->wait_holding(2, 20s));
  const FaultRequest late = cluster.request(2, 5), unclaimed = cluster.request(3, 5);
  for (auto& prefill : cluster.prefills) ASSERT_TRUE(prefill->open(late.room).ok());
  cluster.publish(unclaimed);
  ASSERT_TRUE(cluster.pull(group, late, 10s).ok());
  for (auto& prefill : cluster.prefills)
    ASSERT_TRUE(eventually([&] { return prefill->stats().leases == 2; }));

  clock.advance(30s);
  // These two end by time alone: each side has looked at its clock.
  EXPECT_EQ(cluster.pull_status().error().code, ErrorCode::deadline_exceeded);
  for (auto& prefill : cluster.prefills) {
    for (int room = 0; room < 2; ++room) {
      const auto event = FaultCluster::next<RoomEvent>(*prefill);
      ASSERT_TRUE(event);
      EXPECT_FALSE(event->status.ok());
      EXPECT_NE(event->room, held.room);
    }
  }
  setup.decode_faults->release();
  const Status status = cluster.pull_status();
  EXPECT_TRUE(status.ok()) << status.error().message;
  EXPECT_TRUE(cluster.exact(held));
  cluster.expect_room_ends(held.room, true);
  EXPECT_EQ(cluster.decode->stats().peers_lost, 0U);
}

// acceptance 37
TEST(FaultTest, AnyControlMessageMayBeLostDoubledLateOrOutOfOrder) {
  for (const FrameFate fate : {FrameFate::drop, FrameFate::duplicate, FrameFate::delay,
                               FrameFate::reorder, FrameFate::cut}) {
    for (std::uint64_t n = 0;; ++n) {
      SCOPED_TRACE(fmt::format("fate {} of frame {}", static_cast<int>(fate), n));
      FaultSetup setup;
      setup.one_page_pieces();
      setup.prefill.heartbeat = setup.decode.heartbeat = 500ms;
      setup.prefill.peer_timeout = setup.decode.peer_timeout = 4s;
      setup.prefill.slot_timeout = 200ms;
      setup.prefill.lease = 200ms;
      setup.prefill.pull_timeout = 400ms;
      setup.decode.reconnect_min = 1ms;
      FaultCluster cluster{setup};
      ASSERT_TRUE(cluster.start().ok());
      std::atomic<bool> fired{false}, armed{false};
      std::atomic<std::uint64_t> frames{0};
      auto proxy = ControlProxy::create("127.0.0.1", cluster.prefills[0]->member().port,
                                        [&](const ProxiedFrame& frame) {
                                          if (frame.type == 9 || !armed) return FrameFate::pass;
                                          if (frames++ != n) return FrameFate::pass;
                                          fired = true;
                                          return fate;
                                        })
                       .value();
      GroupSpec spec = cluster.spec();
      spec.members[0].port = proxy->port();
      const auto group = cluster.decode->connect(spec, 20s);
      ASSERT_TRUE(group.ok());
      armed = true;
      const FaultRequest request = cluster.request(1, 5);
      cluster.publish(request);
      ASSERT_TRUE(cluster.pull(*group, request, 300ms).ok());
      const auto event = FaultCluster::next<PullEvent>(*cluster.decode, 5s);
      ASSERT_TRUE(event);
      if (event->status) {
        EXPECT_TRUE(cluster.exact(request));
      }
      EXPECT_TRUE(cluster.canaries());
      for (auto& prefill : cluster.prefills)
        ASSERT_TRUE(FaultCluster::next<RoomEvent>(*prefill, 5s));
      ASSERT_TRUE(eventually([&] { return cluster.idle(); }));
      if (!fired) {
        EXPECT_TRUE(event->status.ok()) << event->status.error().message;
        break;
      }
      armed = false;
      ASSERT_TRUE(eventually([&] { return cluster.decode->stats().peers == 2; }));
      cluster.expect_works(*group, 2);
    }
  }
}

// The handshake too: connect() ends in time, or works.
TEST(FaultTest, TheHandshakeMayBeLostDoubledOrCut) {
  for (const FrameFate fate : {FrameFate::drop, FrameFate::duplicate, FrameFate::cut}) {
    for (std::uint64_t n = 0; n < 2; ++n) {
      SCOPED_TRACE(fmt::format("fate {} of frame {}", static_cast<int>(fate), n));
      FaultSetup setup;
      setup.prefill.heartbeat = setup.decode.heartbeat = 20ms;
      setup.prefill.peer_timeout = setup.decode.peer_timeout = 500ms;
      setup.decode.reconnect_min = 1ms;
      FaultCluster cluster{setup};
      ASSERT_TRUE(cluster.start().ok());
      auto proxy = ControlProxy::create("127.0.0.1", cluster.prefills[0]->member().port,
                                        [=](const ProxiedFrame& frame) {
                                          return frame.number == n ? fate : FrameFate::pass;
                                        })
                       .value();
      GroupSpec spec = cluster.spec();
      spec.members[0].port = proxy->port();
      auto group = cluster.decode->connect(spec, 20s);
      if (!group) {  // a doubled HELLO is refused for good, as it should be
        EXPECT_EQ(fate, FrameFate::duplicate) << group.error().message;
        group = cluster.decode->connect(spec, 20s);
      }
      ASSERT_TRUE(group.ok()) << group.error().message;
      ASSERT_TRUE(eventually([&] { return cluster.decode->stats().peers == 2; }));
      cluster.expect_works(*group, 1);
    }
  }
}

// ---- shutdown --------------------------------------------------------------------------------------

// acceptance 40
TEST(FaultTest, ShutdownWithWorkInFlightIsBoundedAndEndsEverything) {
  for (const FaultPoint point :
       {FaultPoint::gather, FaultPoint::gather_end, FaultPoint::fetch, FaultPoint::fetch_end,
        FaultPoint::scatter, FaultPoint::scatter_end}) {
    for (const bool decode_first : {true, false}) {
      SCOPED_TRACE(fmt::format("point {}, decode first {}", static_cast<int>(point), decode_first));
      FaultSetup setup;
      setup.prefill_faults = setup.decode_faults = hold_all(point);
      FaultCluster cluster{setup};
      ASSERT_TRUE(cluster.start().ok());
      const GroupId group = cluster.connect();
      const FaultRequest request = cluster.request(1, 6);
      cluster.publish(request);
      ASSERT_TRUE(cluster.pull(group, request).ok());
      ASSERT_TRUE(setup.decode_faults->wait_holding(2, 20s));
      std::vector<std::jthread> closers;
      const auto since = std::chrono::steady_clock::now();
      // Copies under way are waited for, so another thread lets them go; gets end by themselves.
      if (point != FaultPoint::fetch && point != FaultPoint::fetch_end)
        closers.emplace_back([&] {
          // Once closing has begun: the lease is gone on either side.
          (void)eventually([&] { return cluster.prefills[0]->stats().leases == 0; });
          setup.decode_faults->release();
        });
      const auto close_prefills = [&] {
        for (auto& prefill : cluster.prefills) prefill->close();
      };
      if (!decode_first) close_prefills();
      closers.emplace_back([&] { cluster.decode->close(); });  // from two threads at once
      cluster.decode->close();
      closers.clear();
      if (decode_first) close_prefills();
      EXPECT_LT(std::chrono::steady_clock::now() - since, 8s);
      EXPECT_FALSE(cluster.pull_status(0ms).ok());
      EXPECT_FALSE(FaultCluster::next<PullEvent>(*cluster.decode, 0ms));
      // A rank may still have said VALID when the other had begun to close.
      for (auto& prefill : cluster.prefills)
        EXPECT_TRUE(FaultCluster::next<RoomEvent>(*prefill, 0ms));
      EXPECT_EQ(cluster.decode->stats().pulls, 0U);
      EXPECT_EQ(cluster.decode->stats().landing_in_use, 0U);
      EXPECT_FALSE(cluster.pull(group, request).ok());
      EXPECT_FALSE(cluster.prefills[0]->open(RoomId{2}).ok());
    }
  }
}

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_{std::move(inner)} {}
  [[nodiscard]] std::string_view kind() const noexcept override { return inner_->kind(); }
  [[nodiscard]] std::span<const std::byte> address() const noexcept override {
    return inner_->address();
  }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(std::span<std::byte> bytes,
                                                            MemoryKind memory) override {
    return inner_->register_memory(bytes, memory);
  }
  Status serve(const RegisteredMemory& memory) override { return inner_->serve(memory); }
  Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                            std::span<const std::byte> packed,
                                            EndpointListener& listener) override {
    return inner_->connect(address, packed, listener);
  }
  std::size_t progress() noexcept override { return inner_->progress(); }
  [[nodiscard]] int wake_fd() const noexcept override { return inner_->wake_fd(); }
  bool arm() noexcept override { return inner_->arm(); }

 private:
  std::unique_ptr<Transport> inner_;
};

// Keeps what it was given, also when its endpoint is closed.
class StubbornTransport final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                            std::span<const std::byte> packed,
                                            EndpointListener& listener) override {
    auto endpoint = ForwardingTransport::connect(address, packed, listener);
    if (!endpoint) return std::move(endpoint).error();
    return std::make_unique<StubbornEndpoint>(std::move(endpoint).value());
  }

 private:
  struct StubbornEndpoint final : Endpoint {
    explicit StubbornEndpoint(std::unique_ptr<Endpoint> inner_) : inner{std::move(inner_)} {}
    Status probe(std::span<std::byte> local, TransferListener& listener) override {
      return inner->probe(local, listener);
    }
    [[nodiscard]] const PathReport& path() const noexcept override { return inner->path(); }
    Status fetch(std::uint64_t, std::span<std::byte>, TransferListener&) override {
      ++kept;
      return {};
    }
    [[nodiscard]] std::size_t in_flight() const noexcept override { return kept; }
    void close() noexcept override { inner->close(); }
    [[nodiscard]] bool closed() const noexcept override { return kept == 0 && inner->closed(); }

    std::unique_ptr<Endpoint> inner;
    std::size_t kept{0};
  };
};

// acceptance 40: closing is bounded all the same, and the memory that may still be written is never freed.
TEST(FaultTest, ATransportThatDoesNotLetGoCostsMemoryButNoHang) {
  FaultSetup setup;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  DecodeOptions options;
  options.pool = cluster.pool->pool();
  auto stubborn = std::make_unique<StubbornTransport>(make_transport(setup.transport).value());
  cluster.decode =
      DecodeRank::create(options, std::move(stubborn), make_copy_engine({}).value()).value();
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 6);
  cluster.publish(request);
  ASSERT_TRUE(cluster.pull(group, request).ok());
  ASSERT_TRUE(eventually([&] { return cluster.decode->stats().landing_in_use == 2; }));
  const RunningTime watch;
  cluster.decode->close();
  EXPECT_LT(watch.elapsed(), 4s);
  EXPECT_EQ(cluster.pull_status(0ms).error().code, ErrorCode::cancelled);
  EXPECT_EQ(cluster.decode->stats().quarantined, 2U);
  cluster.decode.reset();
  cluster.expect_room_ends(request.room, false);
}

// Counts the turns of an idle rank, and the times that it prepares for a sleep.
class CountingTransport final : public ForwardingTransport {
 public:
  struct Counts {
    std::atomic<int> turns{0};
    std::atomic<int> arms{0};
  };
  CountingTransport(std::unique_ptr<Transport> inner, Counts& counts)
      : ForwardingTransport{std::move(inner)}, counts_{counts} {}
  std::size_t progress() noexcept override {
    ++counts_.turns;
    return ForwardingTransport::progress();
  }
  bool arm() noexcept override {
    ++counts_.arms;
    return ForwardingTransport::arm();
  }

 private:
  Counts& counts_;
};

TEST(BusyPollTest, AnIdleRankSleepsOrPollsAsItIsTold) {
  for (const auto busy_poll : {0us, std::chrono::microseconds{1h}}) {
    const FaultSetup setup;
    CountingTransport::Counts counts[2];
    const auto transport = [&](int rank) {
      return std::make_unique<CountingTransport>(make_transport(setup.transport).value(),
                                                 counts[rank]);
    };
    PatternedPool pool{small_geometry(16)};
    PrefillOptions prefill_options;
    prefill_options.pool = pool.pool();
    prefill_options.busy_poll = busy_poll;
    const auto prefill =
        PrefillRank::create(prefill_options, transport(0), make_copy_engine({}).value());
    DecodeOptions decode_options;
    decode_options.pool = pool.pool();
    decode_options.busy_poll = busy_poll;
    const auto decode =
        DecodeRank::create(decode_options, transport(1), make_copy_engine({}).value());
    ASSERT_TRUE(prefill.ok() && decode.ok());
    for (CountingTransport::Counts& rank : counts) {
      if (busy_poll == 0us) {
        EXPECT_TRUE(eventually([&] { return rank.arms > 0; }));
      } else {
        EXPECT_TRUE(eventually([&] { return rank.turns > 10'000; }));
        EXPECT_EQ(rank.arms, 0);
      }
    }
  }
}

}  // namespace
}  // namespace kvshard::test
