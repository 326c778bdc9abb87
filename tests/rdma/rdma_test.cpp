// Fetches and pulls over real verbs, between the two devices that scripts/rdma_vm.sh makes: decode ranks use rxe0
// on vA, prefill ranks rxe1 on vB, so that all RDMA traffic crosses the pair of network devices and can be harmed
// there. The prefix of a suite's instance names the transport: Rc/ or Ud/. A test chooses transport and devices
// only; all else that UCX needs on RoCE the library has to set.
//
// The guest is some 30 times slower than its host, and its host may be busy: a limit here only tells a bounded wait
// from an endless one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "support/cluster.hpp"
#include "support/fault_processes.hpp"
#include "support/transport_conformance.hpp"

namespace kvshard::testing {
namespace {

constexpr auto kLimit = 60s;

enum class Side { decode, prefill };
void use_device_of(Side side) {
  ::setenv("UCX_NET_DEVICES", side == Side::decode ? "rxe0:1" : "rxe1:1", 1);
}

class Devices final : public ::testing::Environment {
 public:
  void SetUp() override {
    const std::filesystem::path all{"/sys/class/infiniband"};
    if (exists(all / "rxe0") && exists(all / "rxe1")) return;
    if (std::getenv("KVSHARD_REQUIRE_RDMA") != nullptr) FAIL() << "no devices rxe0 and rxe1";
    // gtest says "passed" of tests that an environment skips; ctest looks for this mark.
    std::puts("[  SKIPPED ] not run: no RDMA devices rxe0 and rxe1; see scripts/rdma_vm.sh");
    GTEST_SKIP();
  }
};

class ChooseTransport final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    const std::string_view suite{test.test_suite_name()};
    ::setenv("UCX_TLS", suite.starts_with("Ud/") ? "ud_verbs,self" : "rc_v,self", 1);
    use_device_of(Side::decode);
  }
};

[[maybe_unused]] const bool kRegistered = [] {
  ::testing::AddGlobalTestEnvironment(new Devices);
  ::testing::UnitTest::GetInstance()->listeners().Append(new ChooseTransport);
  // An owner has a seed.
  before_rank = [](std::uint64_t seed) { use_device_of(seed == 0 ? Side::decode : Side::prefill); };
  return true;
}();

bool over_rc() {
  return std::string_view{std::getenv("UCX_TLS")}.starts_with("rc");
}

/// Harm to the packets that leave either device, for a scope.
class Netem {
 public:
  explicit Netem(const std::string& harm) {
    for (const auto* device : {"vA", "vB"})
      EXPECT_EQ(run("replace", device, "netem limit 100000 " + harm), 0) << harm;
  }
  ~Netem() {
    for (const auto* device : {"vA", "vB"}) EXPECT_EQ(run("del", device, ""), 0);
  }
  Netem(const Netem&) = delete;
  Netem& operator=(const Netem&) = delete;

 private:
  static int run(const char* verb, const char* device, const std::string& rest) {
    return std::system(fmt::format("tc qdisc {} dev {} root {}", verb, device, rest).c_str());
  }
};

std::uint64_t packets_sent(const char* device) {
  std::ifstream file{fmt::format("/sys/class/net/{}/statistics/tx_packets", device)};
  std::uint64_t count = 0;
  file >> count;
  return count;
}

std::string name_of(const ::testing::TestParamInfo<TransferPath>& test) {
  return std::string{to_string(test.param)};
}
std::string name_of_options(const ::testing::TestParamInfo<TransportOptions>& test) {
  return std::string{to_string(test.param.path)};
}

constexpr TransportOptions options_for(TransferPath path) {
  return {.kind = TransportOptions::Kind::ucx, .path = path};
}

INSTANTIATE_TEST_SUITE_P(Rc, TransportConformance,
                         ::testing::Values(options_for(TransferPath::get),
                                           options_for(TransferPath::am)),
                         name_of_options);
INSTANTIATE_TEST_SUITE_P(Ud, TransportConformance,
                         ::testing::Values(options_for(TransferPath::automatic)), name_of_options);

/// An owner in a process of its own: says its address and its memory, and goes on until it is killed.
void owner_main(int socket, const std::string& path) {
  use_device_of(Side::prefill);
  std::vector<std::byte> bytes(4U << 20);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(42, i);
  const auto transport =
      make_transport(options_for(path == "get" ? TransferPath::get : TransferPath::am)).value();
  auto memory = transport->register_memory(bytes, MemoryKind::host).value();
  if (!transport->serve(*memory)) return;
  for (const auto part : {transport->address(), memory->packed()})
    test::say(socket, {reinterpret_cast<const char*>(part.data()), part.size()});
  for (;;) {
    if (transport->progress() > 0 || !transport->arm()) continue;
    std::array<pollfd, 2> ready{pollfd{.fd = transport->wake_fd(), .events = POLLIN, .revents = 0},
                                pollfd{.fd = socket, .events = POLLIN, .revents = 0}};
    (void)::poll(ready.data(), ready.size(), 100);
    if (ready[1].revents == 0) continue;
    if (!test::hear(socket, 0ms)) return;
    memory.reset();  // the only request is to withdraw it
    std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});
    test::say(socket, "withdrawn");
  }
}

class RdmaFetchTest : public ::testing::TestWithParam<TransferPath> {
 protected:
  static constexpr std::size_t kFetches = 16;
  static constexpr std::size_t kSize = 256U << 10;

  void SetUp() override {
    owner_.emplace(zygote_.spawn(std::string{to_string(GetParam())}));
    const auto address = test::hear(owner_->socket.get(), kLimit);
    const auto packed = test::hear(owner_->socket.get(), kLimit);
    ASSERT_TRUE(address && packed);
    decode_.emplace(options_for(GetParam()), kFetches * kSize);
    auto made = decode_->transport().connect(std::as_bytes(std::span{*address}),
                                             std::as_bytes(std::span{*packed}), failure_);
    ASSERT_TRUE(made) << made.error().message;
    endpoint_ = std::move(*made);
    HeardTransfer probed;
    ASSERT_TRUE(endpoint_->probe(decode_->bytes(), probed));
    ASSERT_TRUE(pump(
        {&*decode_}, [&] { return probed.done(); }, kLimit));
    ASSERT_TRUE(probed.last) << probed.last.error().message;
  }
  void TearDown() override {
    if (owner_) ::kill(owner_->pid, SIGKILL);
    if (!endpoint_) return;
    endpoint_->close();
    EXPECT_TRUE(pump(
        {&*decode_}, [&] { return endpoint_->closed(); }, kLimit));
  }
  void fetch_all() {
    heard_.clear();
    heard_.resize(kFetches);
    for (std::size_t i = 0; i < kFetches; ++i)
      ASSERT_TRUE(
          endpoint_->fetch(i * kSize, decode_->bytes().subspan(i * kSize, kSize), heard_[i]));
  }
  [[nodiscard]] bool pump_until(const std::function<bool()>& done) {
    return pump({&*decode_}, done, kLimit);
  }
  /// Every fetch has ended once, and well with the right bytes or as unavailable. How many went well.
  std::size_t expect_exact_or_unavailable() {
    std::size_t good = 0;
    for (std::size_t i = 0; i < kFetches; ++i) {
      EXPECT_EQ(heard_[i].calls, 1);
      if (!heard_[i].last) {
        EXPECT_EQ(heard_[i].last.error().code, ErrorCode::unavailable)
            << heard_[i].last.error().message;
        continue;
      }
      ++good;
      std::size_t wrong = 0;
      for (std::size_t at = i * kSize; at < (i + 1) * kSize; ++at)
        wrong += decode_->bytes()[at] != pattern(42, at) ? 1U : 0U;
      EXPECT_EQ(wrong, 0U) << "fetch " << i;
    }
    return good;
  }
  void expect_lost() {
    EXPECT_TRUE(pump_until([&] { return endpoint_->in_flight() == 0 && failure_.calls == 1; }))
        << endpoint_->in_flight() << " in flight, failures: " << failure_.calls;
    EXPECT_EQ(failure_.last.code, ErrorCode::unavailable) << failure_.last.message;
  }

  test::Zygote zygote_{owner_main};  // first: it must be made before UCX has threads
  std::optional<test::Zygote::Child> owner_;
  HeardFailure failure_;
  std::optional<TransportRank> decode_;
  std::unique_ptr<Endpoint> endpoint_;
  std::deque<HeardTransfer> heard_;
};

INSTANTIATE_TEST_SUITE_P(Rc, RdmaFetchTest, ::testing::Values(TransferPath::get, TransferPath::am),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Ud, RdmaFetchTest, ::testing::Values(TransferPath::am), name_of);

TEST_P(RdmaFetchTest, TrafficCrossesTheWire) {
  const auto before = packets_sent("vB");
  fetch_all();
  ASSERT_TRUE(pump_until([&] { return endpoint_->in_flight() == 0; }));
  EXPECT_EQ(expect_exact_or_unavailable(), kFetches);
  EXPECT_GE(packets_sent("vB") - before, kFetches * kSize / 4096);
}

// acceptance 33: over verbs nobody closes a socket for the dead, so this is by retries and keepalive alone.
TEST_P(RdmaFetchTest, KilledOwnerFailsItsFetches) {
  const Netem slow{"rate 100mbit"};
  fetch_all();
  ASSERT_TRUE(pump_until([&] { return endpoint_->in_flight() < kFetches; }));
  ::kill(owner_->pid, SIGKILL);
  expect_lost();
  EXPECT_LT(expect_exact_or_unavailable(), kFetches);
}
TEST_P(RdmaFetchTest, KilledIdleOwnerIsReported) {
  ::kill(owner_->pid, SIGKILL);
  expect_lost();
}

// acceptance 34, the transport's part
TEST_P(RdmaFetchTest, LostWireFailsTheFetches) {
  std::optional<Netem> harm{"rate 100mbit"};
  fetch_all();
  ASSERT_TRUE(pump_until([&] { return endpoint_->in_flight() < kFetches; }));
  harm.reset();
  harm.emplace("loss 100%");
  expect_lost();
  (void)expect_exact_or_unavailable();
}
TEST_P(RdmaFetchTest, LostWireIsReportedWhenIdle) {
  const Netem lost{"loss 100%"};
  expect_lost();
}

// acceptance 27, the transport's part: an old rkey reads nothing.
TEST_P(RdmaFetchTest, WithdrawnMemoryIsNotRead) {
  test::say(owner_->socket.get(), "withdraw");
  ASSERT_TRUE(test::hear(owner_->socket.get(), kLimit));
  fetch_all();
  ASSERT_TRUE(pump_until([&] { return endpoint_->in_flight() == 0; }));
  EXPECT_EQ(expect_exact_or_unavailable(), 0U);
}

class RdmaPullTest : public ::testing::TestWithParam<TransferPath> {
 protected:
  /// Pages of 64 KiB, in processes of their own.
  static test::ClusterOptions options(std::uint32_t shard_size) {
    use_device_of(Side::prefill);
    test::ClusterOptions made{.where = test::Where::ucx_processes,
                              .shard_size = shard_size,
                              .pages_per_rank = 33,
                              .decode_pages = 41,
                              .geometry = test::small_geometry(0, 4, 2, 16, 4, 128),
                              .path = GetParam(),
                              .before_decode = [] { use_device_of(Side::decode); }};
    made.prefill.heartbeat = made.decode.heartbeat = 2s;
    made.prefill.peer_timeout = made.decode.peer_timeout = 30s;
    made.prefill.slot_payload_bytes = made.decode.landing_payload_bytes = 256U << 10;
    made.decode.fetch_timeout = kLimit;
    made.prefill.slot_timeout = kLimit;
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Rc, RdmaPullTest, ::testing::Values(TransferPath::automatic), name_of);
INSTANTIATE_TEST_SUITE_P(Ud, RdmaPullTest, ::testing::Values(TransferPath::automatic), name_of);

// acceptance 1, over verbs
TEST_P(RdmaPullTest, PullsExactBytesFromEveryShardSize) {
  std::uint64_t room = 1;
  for (const std::uint32_t n : {1U, 2U, 4U}) {
    test::Cluster cluster{options(n)};
    const auto group = cluster.connect();
    for (std::uint32_t rank = 0; rank < n; ++rank) {
      const auto path = cluster.decode->path(group, rank);
      ASSERT_TRUE(path.ok()) << path.error().message;
      EXPECT_EQ(path->path, over_rc() ? TransferPath::get : TransferPath::am) << path->reason;
      EXPECT_EQ(path->get_native, over_rc()) << path->reason;
    }
    for (const std::uint32_t pages : {0U, 1U, n + 1, 20U}) {
      SCOPED_TRACE(fmt::format("N={} K={}", n, pages));
      cluster.run_request(group, RoomId{room++}, pages);
      if (HasFatalFailure()) return;
    }
    cluster.expect_idle();
  }
}

// acceptance 37, for the data's network
TEST_P(RdmaPullTest, PullsExactBytesThroughABadNetwork) {
  test::Cluster cluster{options(2)};
  const auto group = cluster.connect();
  std::uint64_t room = 1;
  for (const auto* harm :
       {"loss 1%", "corrupt 1%", "duplicate 5%", "delay 1ms reorder 10%", "delay 1ms 1ms"}) {
    SCOPED_TRACE(harm);
    const Netem netem{harm};
    cluster.run_request(group, RoomId{room++}, 20);
    if (HasFatalFailure()) return;
  }
  cluster.expect_idle();
}

// acceptance 33
TEST_P(RdmaPullTest, KilledRankFailsThePull) {
  test::Cluster cluster{options(2)};
  const auto group = cluster.connect();
  const Netem slow{"rate 50mbit"};
  const auto source = cluster.chain(20);
  const auto to = cluster.destinations(20);
  cluster.fill(source, {.request = 1, .generation = 1});
  cluster.open(RoomId{1});
  cluster.publish({.room = RoomId{1}, .pages = source, .last = true});
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{1}, .pages = to}).ok());
  dynamic_cast<test::ChildPrefill&>(*cluster.prefills[1]).kill(SIGKILL);
  const auto event = cluster.next_event(60);
  ASSERT_TRUE(event.ok()) << event.error().message;
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::unavailable) << event->status.error().message;
}

// acceptance 34: the control connection stands, so that only verbs can tell.
TEST_P(RdmaPullTest, LostWireFailsThePullAndMendsLater) {
  test::Cluster cluster{options(2)};
  const auto group = cluster.connect();
  cluster.run_request(group, RoomId{1}, 4);
  std::optional<Netem> lost{"loss 100%"};
  const auto source = cluster.chain(20);
  const auto to = cluster.destinations(20);
  cluster.fill(source, {.request = 2, .generation = 1});
  cluster.open(RoomId{2});
  cluster.publish({.room = RoomId{2}, .pages = source, .last = true});
  ASSERT_TRUE(cluster.decode->pull({.group = group, .room = RoomId{2}, .pages = to}).ok());
  const auto event = cluster.next_event(40);  // fetch_timeout is 60 s
  ASSERT_TRUE(event.ok()) << event.error().message;
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::unavailable) << event->status.error().message;
  for (auto& prefill : cluster.prefills) {
    const auto ended = prefill->next_event(60);
    ASSERT_TRUE(ended.ok()) << ended.error().message;
    EXPECT_FALSE(ended->status.ok());
  }

  lost.reset();
  const auto until = std::chrono::steady_clock::now() + kLimit;
  while (cluster.decode->stats().peers < 2) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "no session again";
    ::poll(nullptr, 0, 20);
  }
  cluster.run_request(group, RoomId{3}, 4);
}

}  // namespace
}  // namespace kvshard::testing
