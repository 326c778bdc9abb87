// Processes that die, freeze and come back, over UCX; and a network that is cut.
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>

#include <cstdlib>
#include <sstream>

#include "support/fault_cluster.hpp"
#include "support/fault_processes.hpp"
#include "support/prefill_driver.hpp"
#include "support/running_time.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 errs about default member strings
#endif

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;

constexpr Fault kHold{.kind = Fault::Kind::hold};
constexpr TransportOptions kUcx{.kind = TransportOptions::Kind::ucx};
// Noticing a death takes no timer, so its bound is the row's, also where a sanitizer slows us.
constexpr auto kKillLimit = kSanitized ? 3s : 1s;

/// How fast a hang is noticed; the library's defaults are 1 s and 4 s.
struct Pace {
  std::chrono::milliseconds heartbeat{50}, peer_timeout{kSanitized ? 1'500 : 700};
};

/// Where a pull stands when the fault comes.
enum class Stage { no_room, no_chunk, get_not_begun, get_not_told, scatter_not_told, committing };
constexpr Stage kStages[] = {Stage::no_room,      Stage::no_chunk,         Stage::get_not_begun,
                             Stage::get_not_told, Stage::scatter_not_told, Stage::committing};

std::shared_ptr<FaultPlan> plan_for(Stage stage) {
  const auto hold = [](FaultPoint at) {
    return std::make_shared<FaultPlan>(
        [at](FaultPoint point, std::uint64_t) { return point == at ? kHold : Fault{}; });
  };
  switch (stage) {
    case Stage::get_not_begun:
      return hold(FaultPoint::fetch);
    case Stage::get_not_told:
      return hold(FaultPoint::fetch_end);
    case Stage::scatter_not_told:
      return hold(FaultPoint::scatter_end);
    default:
      return nullptr;
  }
}

/// "rank size port epoch group host [device command]" starts a prefill rank, in a network of its own that
/// the command sets up where there is one.
void prefill_main(Pace pace, int socket, const std::string& request) {
  PrefillSetup setup{.options{}, .geometry = small_geometry(65), .transport = kUcx};
  std::istringstream in{request};
  std::string device, namespace_setup;
  in >> setup.options.shard_rank >> setup.options.shard_size >> setup.options.listen_port >>
      setup.options.epoch >> setup.options.group >> setup.options.listen_host;
  setup.geometry = by_page(setup.geometry, setup.options.shard_rank, setup.options.shard_size);
  in >> device;
  std::getline(in >> std::ws, namespace_setup);
  if (!namespace_setup.empty()) {  // its own network, which the parent connects to ours
    const bool own = ::unshare(CLONE_NEWNET | CLONE_NEWNS) == 0;
    say(socket, own ? "unshared" : "failed");
    if (!own || !hear(socket)) return;
    if (std::system(namespace_setup.c_str()) != 0) return;
    // UCX finds devices in /sys, and would take the two loopback devices for one.
    ::setenv("UCX_NET_DEVICES", device.c_str(), 1);
    setup.options.security.allow_unauthenticated_network = true;
  }
  setup.options.heartbeat = pace.heartbeat;
  setup.options.peer_timeout = pace.peer_timeout;
  ChildPrefill::serve(setup, socket);
}

class Group {
 public:
  Group(Zygote& zygote, std::uint32_t size, std::string name, std::uint64_t epoch = 1)
      : zygote_{zygote}, name_{std::move(name)}, epoch_{epoch}, size_{size} {
    layout = PageLayout::create(size, 4).value();
    allocator.emplace(PageAllocator::create(*layout, 64).value());
    for (std::uint32_t rank = 0; rank < size; ++rank) ranks.push_back(make(rank, 0));
  }
  std::unique_ptr<ChildPrefill> make(std::uint32_t rank, std::uint16_t port) {
    auto child =
        zygote_.spawn(fmt::format("{} {} {} {} {} 127.0.0.1", rank, size_, port, epoch_, name_));
    return std::make_unique<ChildPrefill>(child.pid, std::move(child.socket));
  }
  GroupSpec spec() {
    GroupSpec group{.name = name_, .epoch = epoch_, .members = {}};
    for (auto& rank : ranks) group.members.push_back(rank->member());
    return group;
  }
  std::vector<LogicalPage> chain(std::uint32_t pages, const Content& content) {
    std::vector<LogicalPage> drawn(pages);
    EXPECT_TRUE(allocator->draw_chain(drawn).ok());
    for (auto& rank : ranks) rank->fill(drawn, 0, content);
    return drawn;
  }
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }

  std::optional<PageLayout> layout;
  std::optional<PageAllocator> allocator;
  std::vector<std::unique_ptr<ChildPrefill>> ranks;

 private:
  Zygote& zygote_;
  std::string name_;
  std::uint64_t epoch_;
  std::uint32_t size_;
};

/// A decode rank of this process.
class Decoder {
 public:
  Decoder(Pace pace, std::shared_ptr<FaultPlan> faults) : pool{small_geometry(256)} {
    DecodeOptions options;
    options.pool = pool.pool();
    options.heartbeat = pace.heartbeat;
    options.peer_timeout = options.fetch_timeout = pace.peer_timeout;
    options.reconnect_min = 10ms;
    options.reconnect_max = 200ms;
    options.security.allow_unauthenticated_network = true;  // one test has a network of its own
    auto transport = make_transport(kUcx).value();
    auto engine = make_copy_engine({}).value();
    if (faults) {
      transport = make_fault_transport(std::move(transport), faults).value();
      engine = make_fault_copy_engine(std::move(engine), faults);
    }
    rank = DecodeRank::create(std::move(options), std::move(transport), std::move(engine)).value();
  }
  std::vector<LocalPage> pages(std::uint32_t count) {
    std::vector<LocalPage> taken;
    for (std::uint32_t i = 0; i < count; ++i) taken.push_back(LocalPage{1 + next_++ % 255});
    return taken;
  }
  Status wait(std::chrono::milliseconds limit = 20s) {
    auto event = FaultCluster::next<PullEvent>(*rank, limit);
    return event ? std::move(event->status) : Status{Error{ErrorCode::internal, "no event"}};
  }
  void expect_works(GroupId group, Group& source, std::uint64_t room,
                    std::uint32_t pages_wanted = 6) {
    const Content content{.request = room, .generation = 1};
    const auto from = source.chain(pages_wanted, content);
    const auto to = pages(pages_wanted);
    for (auto& prefill : source.ranks) {
      ASSERT_TRUE(prefill->open(RoomId{room}, 1).ok());
      ASSERT_TRUE(prefill->publish({.room = RoomId{room}, .pages = from, .last = true}).ok());
    }
    ASSERT_TRUE(rank->pull({.group = group, .room = RoomId{room}, .pages = to}).ok());
    const Status status = wait();
    ASSERT_TRUE(status.ok()) << status.error().message;
    for (std::uint32_t i = 0; i < pages_wanted; ++i) EXPECT_TRUE(pool.holds(to[i], i, content));
    for (auto& prefill : source.ranks) {
      const auto event = prefill->next_event(20);
      EXPECT_TRUE(event.ok() && event->status.ok());
    }
    EXPECT_TRUE(source.allocator->free_chain(from).ok());
  }
  [[nodiscard]] bool idle() const {
    const DecodeStats s = rank->stats();
    return s.pulls + s.landing_in_use + s.quarantined == 0;
  }

  PatternedPool pool;
  std::unique_ptr<DecodeRank> rank;

 private:
  std::uint32_t next_{0};
};

/// A pull from `group` that stands at `stage`, and one from `other` that waits for its chunk, when
/// `strike` comes; the first fails within `limit`, the second ends well.
void strike_at(Stage stage, Pace pace, Zygote& zygote, bool all, int signal,
               std::chrono::milliseconds limit) {
  SCOPED_TRACE(fmt::format("stage {}, all {}, signal {}", static_cast<int>(stage), all, signal));
  Group group{zygote, 2, "struck"};
  Group other{zygote, 1, "other"};
  const auto faults = plan_for(stage);
  Decoder decoder{pace, faults};
  std::vector<std::unique_ptr<ControlProxy>> proxies;
  GroupSpec spec = group.spec();
  if (stage == Stage::committing) {
    for (GroupMember& member : spec.members) {
      proxies.push_back(
          ControlProxy::create(member.host, member.port, [](const ProxiedFrame& frame) {
            return frame.type == 6 ? FrameFate::drop : FrameFate::pass;  // COMMIT
          }).value());
      member.port = proxies.back()->port();
    }
  }
  const auto struck_group = decoder.rank->connect(spec, 20s);
  const auto other_group = decoder.rank->connect(other.spec(), 20s);
  ASSERT_TRUE(struck_group.ok()) << struck_group.error().message;
  ASSERT_TRUE(other_group.ok()) << other_group.error().message;

  // The survivor's pull, which waits for its chunk while the others are struck.
  const Content kept{.request = 50, .generation = 1};
  const auto kept_from = other.chain(6, kept);
  const auto kept_to = decoder.pages(6);
  ASSERT_TRUE(other.ranks[0]->open(RoomId{50}, 1).ok());
  const auto survivor =
      decoder.rank->pull({.group = *other_group, .room = RoomId{50}, .pages = kept_to});
  ASSERT_TRUE(survivor.ok());

  const auto from = group.chain(6, {.request = 1, .generation = 1});
  const auto to = decoder.pages(6);
  for (auto& rank : group.ranks) {
    if (stage != Stage::no_room) {
      ASSERT_TRUE(rank->open(RoomId{1}, 1).ok());
    }
    if (stage > Stage::no_chunk) {
      ASSERT_TRUE(rank->publish({.room = RoomId{1}, .pages = from, .last = true}).ok());
    }
  }
  const auto struck = decoder.rank->pull({.group = *struck_group, .room = RoomId{1}, .pages = to});
  ASSERT_TRUE(struck.ok());
  for (auto& rank : group.ranks) {
    ASSERT_TRUE(eventually([&] {
      const PrefillStats s = rank->stats();
      return stage == Stage::no_room ? s.pulls_waiting == 1 : s.leases == 1;
    }));
  }
  if (faults) {
    ASSERT_TRUE(faults->wait_holding(2, 20s));
  }
  ASSERT_TRUE(stage != Stage::committing ||
              eventually([&] { return decoder.rank->stats().pieces == 2; }));

  const RunningTime watch;
  for (std::size_t i = 0; i < (all ? 2U : 1U); ++i) group.ranks[i]->kill(signal);
  if (stage ==
      Stage::scatter_not_told) {  // the event waits for the copies, which must end by themselves
    EXPECT_TRUE(eventually([&] { return decoder.rank->stats().peers_lost >= 1; }));
    faults->release();
  }
  const auto event = FaultCluster::next<PullEvent>(*decoder.rank);
  const auto took = watch.elapsed();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->pull, *struck);
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::unavailable) << event->status.error().message;
  EXPECT_LT(took, limit) << event->status.error().message;
  ::testing::Test::RecordProperty("noticed_after_ms", static_cast<int>(took.count()));

  if (faults) faults->release();
  ASSERT_TRUE(other.ranks[0]->publish({.room = RoomId{50}, .pages = kept_from, .last = true}).ok());
  const Status survived = decoder.wait();
  EXPECT_TRUE(survived.ok()) << survived.error().message;
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(decoder.pool.holds(kept_to[i], i, kept));
  ASSERT_TRUE(other.ranks[0]->next_event(20).ok());
  if (!all && stage != Stage::no_room) {  // the sibling was told
    const auto ended = group.ranks[1]->next_event(20);
    ASSERT_TRUE(ended.ok());
    EXPECT_FALSE(ended->status.ok());
  }
  EXPECT_TRUE(eventually([&] { return decoder.idle(); }));
  if (signal == SIGSTOP) {
    for (std::size_t i = 0; i < (all ? 2U : 1U); ++i) group.ranks[i]->kill(SIGCONT);
    ASSERT_TRUE(eventually([&] { return decoder.rank->stats().peers == 3; }));
    proxies.clear();
    if (stage == Stage::committing) return;  // its way to the ranks is gone with the proxies
    for (std::size_t i = 0; stage != Stage::no_room && i < (all ? 2U : 1U); ++i)
      EXPECT_FALSE(group.ranks[i]->next_event(20).value().status.ok());
    decoder.expect_works(*struck_group, group, 2);
  }
}

void PrintTo(Stage stage, std::ostream* out) {
  *out << "stage " << static_cast<int>(stage);
}

class FaultStageTest : public ::testing::TestWithParam<Stage> {};
INSTANTIATE_TEST_SUITE_P(At, FaultStageTest, ::testing::ValuesIn(kStages));

// acceptance 33
TEST_P(FaultStageTest, OnePrefillRankIsKilled) {
  const Pace pace;
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  strike_at(GetParam(), pace, zygote, false, SIGKILL, kKillLimit);
}
TEST_P(FaultStageTest, AllPrefillRanksAreKilled) {
  const Pace pace;
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  strike_at(GetParam(), pace, zygote, true, SIGKILL, kKillLimit);
}
// acceptance 34
TEST_P(FaultStageTest, OnePrefillRankHangsAndRecovers) {
  const Pace pace;
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  strike_at(GetParam(), pace, zygote, false, SIGSTOP, pace.peer_timeout + 1s);
}
TEST(FaultTest, AHangIsNoticedWithinFiveSecondsByDefault) {
  // Both ends live in networks of their own, so that tests that run beside this one never see the device.
  if (::unshare(CLONE_NEWNET | CLONE_NEWNS) != 0 ||
      std::system("mount --make-rprivate / && mount -t sysfs kvshard /sys && ip link set lo up") !=
          0)
    GTEST_SKIP() << "cannot make a network namespace";
  const Pace pace{1'000ms, 4'000ms};
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  strike_at(Stage::no_chunk, pace, zygote, true, SIGSTOP, 5s);
}

/// "stage host:port ..." starts a decode rank that pulls room 1 and says when it stands at the stage.
void decode_main(Pace pace, int socket, const std::string& request) {
  std::istringstream in{request};
  int stage = 0;
  GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {}};
  in >> stage;
  for (GroupMember member; in >> member.host >> member.port; ++member.shard_rank)
    spec.members.push_back(member);
  const auto faults = plan_for(static_cast<Stage>(stage));
  Decoder decoder{pace, faults};
  const auto group = decoder.rank->connect(spec, 20s);
  const auto to = decoder.pages(6);
  if (!group || !decoder.rank->pull({.group = *group, .room = RoomId{1}, .pages = to})) return;
  if (faults && !faults->wait_holding(2, 20s)) return;
  if (static_cast<Stage>(stage) == Stage::committing &&
      !eventually([&] { return decoder.rank->stats().pieces == 2; }))
    return;
  say(socket, "there");
  (void)hear(socket, 1h);
}

void strike_decode_at(Stage stage, int signal, std::chrono::milliseconds limit, Pace pace) {
  SCOPED_TRACE(fmt::format("stage {}, signal {}", static_cast<int>(stage), signal));
  Zygote zygote{
      [&](int socket, const std::string& request) { decode_main(pace, socket, request); }};
  FaultSetup setup;
  setup.transport = kUcx;
  setup.prefill.heartbeat = setup.decode.heartbeat = pace.heartbeat;
  setup.prefill.peer_timeout = setup.decode.peer_timeout = pace.peer_timeout;
  FaultCluster cluster{setup};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const FaultRequest request = cluster.request(1, 6);
  for (auto& prefill : cluster.prefills) {
    if (stage != Stage::no_room) {
      ASSERT_TRUE(prefill->open(request.room).ok());
    }
    if (stage > Stage::no_chunk) {
      ASSERT_TRUE(prefill->publish(request.room, {.pages = request.source, .last = true}).ok());
    }
  }
  std::string text = std::to_string(static_cast<int>(stage));
  std::vector<std::unique_ptr<ControlProxy>> proxies;
  for (auto& prefill : cluster.prefills) {
    const GroupMember member = prefill->member();
    proxies.push_back(
        ControlProxy::create(member.host, member.port, [=](const ProxiedFrame& frame) {
          return frame.type == 6 && stage == Stage::committing ? FrameFate::drop : FrameFate::pass;
        }).value());
    text += fmt::format(" {} {}", member.host, proxies.back()->port());
  }
  auto child = zygote.spawn(text);
  ASSERT_TRUE(hear(child.socket.get()));
  for (auto& prefill : cluster.prefills) {
    ASSERT_TRUE(
        eventually([&] { return prefill->stats().leases + prefill->stats().pulls_waiting == 1; }));
  }

  const RunningTime watch;
  ::kill(child.pid, signal);
  for (auto& prefill : cluster.prefills) {
    ASSERT_TRUE(
        eventually([&] { return prefill->stats().leases + prefill->stats().pulls_waiting == 0; }));
    EXPECT_LT(watch.elapsed(), limit);
    EXPECT_EQ(prefill->stats().peers, 1U);
  }
  if (stage != Stage::no_room) cluster.expect_room_ends(request.room, false);
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
  cluster.expect_works(group, 2);  // the other decode rank
  ::kill(child.pid, SIGKILL);
}

// acceptance 33
TEST_P(FaultStageTest, TheDecodeRankIsKilled) {
  strike_decode_at(GetParam(), SIGKILL, kKillLimit, Pace{});
}
// acceptance 34
TEST_P(FaultStageTest, TheDecodeRankHangs) {
  const Pace pace;
  strike_decode_at(GetParam(), SIGSTOP, pace.peer_timeout + 1s, pace);
}

// acceptance 35
TEST(FaultTest, ARankRestartsAHundredTimesOnOneAddress) {
  const int restarts = kSanitized ? 20 : 100;
  const Pace pace{100ms, 4'000ms};
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  Group group{zygote, 1, "kvshard"};
  Decoder decoder{pace, nullptr};
  const std::uint16_t port = group.ranks[0]->member().port;
  auto id = decoder.rank->connect(group.spec(), 20s);
  ASSERT_TRUE(id.ok());
  ProcessUse before;
  for (int restart = 1; restart <= restarts; ++restart) {
    SCOPED_TRACE(restart);
    const std::uint64_t room = static_cast<std::uint64_t>(restart) * 2;
    decoder.expect_works(*id, group, room);
    if (HasFatalFailure()) return;
    if (restart == restarts / 5) before = ProcessUse::now();
    // An old room is under way when its process dies.
    const auto to = decoder.pages(4);
    ASSERT_TRUE(group.ranks[0]->open(RoomId{room + 1}, 1).ok());
    ASSERT_TRUE(decoder.rank->pull({.group = *id, .room = RoomId{room + 1}, .pages = to}).ok());
    ASSERT_TRUE(eventually([&] { return group.ranks[0]->stats().leases == 1; }));
    group.ranks[0]->kill(SIGKILL);
    Status status = decoder.wait();
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.error().message.find(fmt::format("epoch {}", restart)), std::string::npos)
        << status.error().message;

    group.set_epoch(static_cast<std::uint64_t>(restart) + 1);
    group.ranks[0] = group.make(0, port);
    ASSERT_EQ(group.ranks[0]->member().port, port);
    group.allocator.emplace(PageAllocator::create(*group.layout, 64).value());
    const auto old = *id;
    id = decoder.rank->connect(group.spec(), 20s);
    ASSERT_TRUE(id.ok()) << id.error().message;
    // The old group stays refused, for a reason that names both epochs.
    if (decoder.rank->pull({.group = old, .room = RoomId{room + 1}, .pages = to})) {
      status = decoder.wait();
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().code, ErrorCode::unavailable) << status.error().message;
    }
    decoder.rank->disconnect(old);
  }
  EXPECT_TRUE(eventually([&] { return decoder.idle() && decoder.rank->stats().peers == 1; }));
  const ProcessUse after = ProcessUse::now();
  // UCX lets go of a dead endpoint's descriptors a little later.
  EXPECT_TRUE(eventually([&] { return ProcessUse::now().fds <= before.fds + 2; }, 10s))
      << before.fds << " became " << ProcessUse::now().fds;
  EXPECT_EQ(after.threads, before.threads);
  if (!kSanitized) {
    EXPECT_LT(after.resident_kib, before.resident_kib + 8 * 1024);
  }
}

// acceptance 34: a real cut, between two network namespaces. Both are this test's own: in the one that it was started
// in, tests beside it would take a device that comes and goes for one of theirs.
TEST(FaultTest, TheNetworkIsCutAndRestored) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to make network namespaces";
  const auto shell = [](const std::string& command) {
    return std::system(("{ " + command + "; } 2>/dev/null").c_str()) == 0;
  };
  if (!shell("ip -V >/dev/null")) GTEST_SKIP() << "needs the ip tool";
  const std::string set_up =
      "mount --make-rprivate / && mount -t sysfs kvshard /sys && ip link set lo up";
  if (::unshare(CLONE_NEWNET | CLONE_NEWNS) != 0 || !shell(set_up))
    GTEST_SKIP() << "cannot unshare the network";
  const Pace pace{1'000ms, 4'000ms};
  Zygote zygote{
      [&](int socket, const std::string& request) { prefill_main(pace, socket, request); }};
  // UCX takes no device that does not run yet, which is a little after it is up.
  const auto runs = [](std::string_view device) {
    return fmt::format(
        "timeout 10 sh -c 'until grep -q up /sys/class/net/{}/operstate; do :; done'", device);
  };
  const std::string theirs = "10.213.0.2";
  auto child = zygote.spawn(fmt::format(
      "0 1 0 1 kvshard {} kvb {} && ip addr add {}/30 dev kvb && ip link set kvb up && {}", theirs,
      set_up, theirs, runs("kvb")));
  if (hear(child.socket.get()) != "unshared") GTEST_SKIP() << "cannot unshare the network twice";
  if (!shell(fmt::format("ip link add kva type veth peer name kvb netns {}", child.pid)))
    GTEST_SKIP() << "cannot make a veth pair";
  ASSERT_TRUE(shell("ip addr add 10.213.0.1/30 dev kva && ip link set kva up"));
  say(child.socket.get(), "go");
  ChildPrefill prefill{child.pid, std::move(child.socket)};
  ASSERT_EQ(prefill.member().host, theirs);
  ASSERT_TRUE(shell(runs("kva")));

  ::setenv("UCX_NET_DEVICES", "kva", 1);
  Decoder decoder{pace, nullptr};
  ::unsetenv("UCX_NET_DEVICES");
  const GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {prefill.member()}};
  const auto group = decoder.rank->connect(spec, 20s);
  ASSERT_TRUE(group.ok()) << group.error().message;
  const auto request = [&](std::uint64_t room, const std::function<void()>& before_chunk) {
    const Content content{.request = room, .generation = 1};
    const std::vector<LogicalPage> from{LogicalPage{1}, LogicalPage{2}, LogicalPage{3}};
    const auto to = decoder.pages(3);
    prefill.fill(from, 0, content);
    EXPECT_TRUE(prefill.open(RoomId{room}, 1).ok());
    EXPECT_TRUE(decoder.rank->pull({.group = *group, .room = RoomId{room}, .pages = to}).ok());
    EXPECT_TRUE(eventually([&] { return prefill.stats().leases == 1; }));
    before_chunk();
    (void)prefill.publish({.room = RoomId{room}, .pages = from, .last = true});
    const Status status = decoder.wait();
    if (status) {
      for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(decoder.pool.holds(to[i], i, content));
    }
    return status;
  };
  Status status = request(1, [] {});
  ASSERT_TRUE(status.ok()) << status.error().message;
  EXPECT_TRUE(prefill.next_event(20).value().status.ok());

  RunningTime watch;
  status = request(2, [&] {
    watch.restart();
    EXPECT_TRUE(shell("ip link set kva down"));
  });
  EXPECT_LT(watch.elapsed(), 5s);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unavailable) << status.error().message;
  EXPECT_FALSE(prefill.next_event(20).value().status.ok());
  EXPECT_LT(watch.elapsed(), 6s);

  ASSERT_TRUE(shell("ip link set kva up"));
  ASSERT_TRUE(eventually([&] { return decoder.rank->stats().peers == 1; }));
  status = request(3, [] {});
  EXPECT_TRUE(status.ok()) << status.error().message;
  EXPECT_TRUE(eventually([&] { return decoder.idle(); }));
}

}  // namespace
}  // namespace kvshard::test
