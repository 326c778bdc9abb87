#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/fault_cluster.hpp"
#include "support/fault_raw_peer.hpp"
#include "support/temporary_folder.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr const char* kOne = "the first shared secret\n";
constexpr const char* kTwo = "the second shared secret\n";

class SecurityTest : public testing::Test {
 protected:
  // Puts a secret file in place as an operator should, and returns its name.
  std::string secret(const std::string& name, const std::string& text) const {
    const fs::path fresh = folder_.path() / "fresh";
    std::ofstream{fresh} << text;
    EXPECT_EQ(::chmod(fresh.c_str(), 0600), 0);
    fs::rename(fresh, folder_.path() / name);
    return (folder_.path() / name).string();
  }
  static FaultSetup setup(const std::string& prefill, const std::string& decode) {
    FaultSetup made;
    made.prefill.security.secret_file = prefill;
    made.decode.security.secret_file = decode;
    made.decode.reconnect_min = made.decode.reconnect_max = 5ms;
    return made;
  }

  TemporaryFolder folder_{"security"};
};

wire::Hello hello_for(FaultCluster& cluster) {
  return {.group = "kvshard",
          .epoch = 1,
          .shard_rank = 0,
          .shard_size = 2,
          .transport = "loopback",
          .geometry = cluster.pool->geometry(),
          .landing_payload_bytes = 1U << 20,
          .heartbeat_ms = 100};
}

TEST_F(SecurityTest, RanksThatShareASecretWork) {
  const std::string file = secret("s", kOne);
  FaultCluster cluster{setup(file, file)};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  for (std::uint64_t room = 1; room <= 3; ++room) cluster.expect_works(group, room);
  EXPECT_TRUE(eventually([&] { return cluster.idle(); }));
}

// acceptance 43: on both sides, in milliseconds, and before an address or a key is given out. The raw peer
// hears BYE and nothing else.
TEST_F(SecurityTest, AWrongSecretAndNoSecretAreRefusedNamingThem) {
  const std::string one = secret("1", kOne), two = secret("2", kTwo);
  struct Case {
    std::string prefill, decode;
    const char* why;
  };
  for (const Case& c :
       {Case{one, two, "the decode rank's secret is not the prefill rank's"},
        Case{one, "", "the decode rank uses no secret, and this prefill rank requires one"},
        Case{"", one, "the decode rank requires a secret, and this prefill rank has none"}}) {
    SCOPED_TRACE(c.why);
    FaultCluster cluster{setup(c.prefill, c.decode)};
    ASSERT_TRUE(cluster.start().ok());
    const auto began = std::chrono::steady_clock::now();
    const auto group = cluster.decode->connect(cluster.spec(), 20s);
    EXPECT_LT(std::chrono::steady_clock::now() - began, 10s);
    ASSERT_FALSE(group.ok());
    EXPECT_EQ(group.error().code, ErrorCode::failed_precondition);
    EXPECT_NE(group.error().message.find(c.why), std::string::npos) << group.error().message;
    // Decode may know first: the proof is mutual.
    EXPECT_TRUE(eventually([&] {
      return cluster.prefills[0]->stats().peers_refused +
                 cluster.prefills[1]->stats().peers_refused >=
             1;
    }));
    EXPECT_TRUE(eventually([&] { return cluster.prefills[0]->stats().peers == 0; }));
  }
  FaultCluster cluster{setup(one, one)};
  ASSERT_TRUE(cluster.start().ok());
  RawPeer peer{cluster.prefills[0]->member()};
  ASSERT_TRUE(peer.send(hello_for(cluster)));
  const auto answer = peer.receive();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->first, wire::MessageType::bye);
  EXPECT_FALSE(peer.receive());
  cluster.expect_works(cluster.connect(), 1);
}

// acceptance 43: old and future, where no secret is used.
TEST_F(SecurityTest, AnOldAndAFutureVersionAreRefusedNamingBoth) {
  FaultCluster cluster{setup("", "")};
  ASSERT_TRUE(cluster.start().ok());
  for (const auto& [low, high] : {std::pair<std::uint16_t, std::uint16_t>{2, 3}, {9, 65535}}) {
    wire::Hello hello = hello_for(cluster);
    hello.version_min = low;
    hello.version_max = high;
    RawPeer peer{cluster.prefills[0]->member()};
    ASSERT_TRUE(peer.send(hello));
    const auto answer = peer.receive();
    ASSERT_TRUE(answer);
    ASSERT_EQ(answer->first, wire::MessageType::bye);
    const Error error = wire::decode<wire::Bye>(answer->second).value().error;
    EXPECT_EQ(error.code, ErrorCode::unsupported);
    EXPECT_NE(error.message.find(fmt::format("versions {} to {}, this side 1 to 1", low, high)),
              std::string::npos)
        << error.message;
  }
  cluster.expect_works(cluster.connect(), 1);
}

// acceptance 44: knowing the secret does not make what a peer says true.
TEST_F(SecurityTest, AnAuthenticatedPeerThatLiesLosesItsOwnSessionOnly) {
  const std::string file = secret("s", kOne);
  FaultCluster cluster{setup(file, file)};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  std::uint64_t room = 0;
  const wire::Assign all{.lanes = {{.layers = 3, .heads = 2}}};
  const auto lies = [&](const auto& message) {
    RawPeer peer{cluster.prefills[0]->member()};
    ASSERT_TRUE(peer.prove("the first shared secret"));
    ASSERT_TRUE(peer.send(hello_for(cluster)));
    const auto welcome = peer.receive();
    ASSERT_TRUE(welcome && welcome->first == wire::MessageType::welcome);
    ASSERT_TRUE(peer.send(all) && peer.send(message));
    const auto answer = peer.receive();
    ASSERT_TRUE(answer && answer->first == wire::MessageType::bye);
    EXPECT_FALSE(peer.receive());
    EXPECT_TRUE(eventually([&] { return cluster.prefills[0]->stats().peers == 1; }));
    cluster.expect_works(group, ++room);
  };
  lies(wire::Release{.pull = 1, .slot = 4'000'000'000U});
  lies(wire::Pull{.pull = 1, .room = RoomId{9}, .window = 2, .tables = {{.table = 3}}});
  lies(wire::Assign{.lanes = {{.layers = 4'000'000'000U, .heads = 2}}});
  lies(wire::Ready{.pull = 1, .last = true});
  lies(hello_for(cluster));
}

// The three steps of a rotation while sessions come and go; nothing restarts.
TEST_F(SecurityTest, ASecretIsReplacedWhileRanksRun) {
  const std::string prefill = secret("p", kOne), decode = secret("d", kOne);
  FaultCluster cluster{setup(prefill, decode)};
  ASSERT_TRUE(cluster.start().ok());
  std::uint64_t room = 0;
  const auto reconnects = [&] {
    const GroupId group = cluster.connect();
    cluster.expect_works(group, ++room);
    cluster.decode->disconnect(group);
  };
  const std::string both = std::string{kOne} + kTwo, turned = std::string{kTwo} + kOne;
  reconnects();
  for (const std::string& text : {both, turned, std::string{kTwo}}) {
    for (const char* name : {"p", "d"}) {  // one rank after the other
      secret(name, text);
      reconnects();
    }
  }
}

TEST_F(SecurityTest, ABadSecretFileIsAnErrorAtStart) {
  const std::string file = secret("s", kOne);
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  for (const bool prefill : {true, false}) {
    FaultCluster cluster{setup(prefill ? file : "", prefill ? "" : file)};
    const Status status = cluster.start();
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(status.error().message.find("mode 0644"), std::string::npos)
        << status.error().message;
  }
}

TEST_F(SecurityTest, WithoutASecretOnlyLoopbackIsAcceptedUnlessAllowed) {
  FaultSetup open = setup("", "");
  open.prefill.listen_host = "0.0.0.0";
  FaultCluster refused{open};
  const Status status = refused.start();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(status.error().message.find("0.0.0.0:0 is no loopback address"), std::string::npos)
      << status.error().message;
  open.prefill.security.allow_unauthenticated_network = true;
  FaultCluster allowed{open};
  EXPECT_TRUE(allowed.start().ok());
  const std::string file = secret("s", kOne);
  FaultSetup with_secret = setup(file, file);
  with_secret.prefill.listen_host = "0.0.0.0";
  FaultCluster secured{with_secret};
  EXPECT_TRUE(secured.start().ok());

  FaultCluster cluster{setup("", "")};
  ASSERT_TRUE(cluster.start().ok());
  GroupSpec spec = cluster.spec();
  spec.members[1].host = "192.0.2.1";
  const auto group = cluster.decode->connect(spec, 20s);
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(group.error().message.find("192.0.2.1"), std::string::npos) << group.error().message;
}

// How long a small request takes beside whatever else is going on: the middle one of several.
Duration request_time(FaultCluster& cluster, GroupId group, std::uint64_t& room) {
  std::vector<Duration> times;
  for (int i = 0; i < 15; ++i) {
    const auto began = std::chrono::steady_clock::now();
    cluster.expect_works(group, ++room, 4);
    times.push_back(std::chrono::steady_clock::now() - began);
  }
  std::nth_element(times.begin(), times.begin() + 7, times.end());
  return times[7];
}
// A stall that a flood can cause would be seconds; a busy machine's own noise is not.
constexpr Duration kFlat = 250ms;

UniqueFd connect_from(const std::string& host, const GroupMember& member) {
  UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in from{};
  from.sin_family = AF_INET;
  (void)::inet_pton(AF_INET, host.c_str(), &from.sin_addr);
  sockaddr_in to = from;
  to.sin_port = htons(member.port);
  (void)::inet_pton(AF_INET, member.host.c_str(), &to.sin_addr);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof from) != 0 ||
      ::connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0)
    return UniqueFd{};
  return fd;
}

// Slow-loris: many connections that send a byte and no more.
TEST_F(SecurityTest, HandshakesThatDripEndAndOthersDoNotNotice) {
  const std::string file = secret("s", kOne);
  FaultSetup options = setup(file, file);
  options.prefill.heartbeat = options.decode.heartbeat = 20ms;
  options.prefill.limits.handshake_timeout = 200ms;
  options.prefill.limits.max_handshakes = 64;
  options.prefill.limits.max_handshakes_per_address = 32;
  FaultCluster cluster{options};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const auto& rank = *cluster.prefills[0];
  const std::uint64_t before = rank.stats().peers;
  std::vector<UniqueFd> dripping;
  for (int i = 0; i < 30; ++i) {
    dripping.push_back(connect_from("127.0.0.9", rank.member()));
    ASSERT_TRUE(dripping.back());
    const char byte = 1;
    ASSERT_EQ(::send(dripping.back().get(), &byte, 1, MSG_NOSIGNAL), 1);
  }
  std::uint64_t room = 0;
  EXPECT_LT(request_time(cluster, group, room), kFlat);
  EXPECT_TRUE(eventually([&] { return rank.stats().handshakes_ended == 30; }));
  EXPECT_TRUE(eventually([&] { return rank.stats().peers == before; }));
}

// A flood of connections from one address, while a rank at another connects anew again and again.
TEST_F(SecurityTest, AFloodOfConnectionsEndsOnlyItsOwnHandshakes) {
  const std::string file = secret("s", kOne);
  FaultSetup options = setup(file, file);
  options.prefill.limits.max_handshakes = 16;
  options.prefill.limits.max_handshakes_per_address = 4;
  options.prefill.limits.handshake_timeout = 60s;  // only the limits end one
  FaultCluster cluster{options};
  ASSERT_TRUE(cluster.start().ok());
  const GroupMember member = cluster.prefills[0]->member();
  std::atomic<std::uint64_t> made{0};
  std::jthread flood{[&](const std::stop_token& stop) {
    std::vector<UniqueFd> held(64);
    while (!stop.stop_requested()) {
      auto fd = connect_from("127.0.0.9", member);
      if (fd) held[made++ % held.size()] = std::move(fd);
    }
  }};
  ASSERT_TRUE(eventually([&] { return made > 100; }));
  std::uint64_t room = 0;
  for (int i = 0; i < 5; ++i) {
    const GroupId group = cluster.connect();
    EXPECT_LT(request_time(cluster, group, room), kFlat);
    cluster.decode->disconnect(group);
  }
  flood.request_stop();
  flood.join();
  const PrefillStats stats = cluster.prefills[0]->stats();
  EXPECT_LE(stats.peers, 4U + 2U);  // the address's handshakes, and a session that is just going
  EXPECT_GE(stats.handshakes_ended, 90U);
}

// One peer asks for rooms that nobody opens, and does not read the answers.
TEST_F(SecurityTest, AFloodOfPullsIsBoundedAndOthersDoNotNotice) {
  FaultSetup options = setup("", "");
  options.prefill.limits.max_pulls_per_peer = 1'000;
  options.prefill.limits.max_queued_bytes = 256U << 10;
  FaultCluster cluster{options};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  const auto& rank = *cluster.prefills[0];
  std::jthread flood{[&](const std::stop_token& stop) {
    for (std::uint64_t pull = 0; !stop.stop_requested();) {
      RawPeer peer{rank.member()};
      wire::Assign assign{
          .lanes = {{.group = 0, .first_layer = 0, .layers = 3, .first_head = 0, .heads = 2}}};
      if (!peer.connected || !peer.send(hello_for(cluster)) || !peer.receive() ||
          !peer.send(assign))
        continue;
      while (!stop.stop_requested() &&
             peer.send(wire::Pull{.pull = ++pull,
                                  .room = RoomId{1'000'000 + pull % 7},
                                  .window = 2,
                                  .wait_ms = 60'000,
                                  .tables = {{.table = 0, .end_token = 16}}})) {
      }
    }
  }};
  ASSERT_TRUE(eventually([&] { return rank.stats().pulls_waiting >= 1'000; }));
  std::uint64_t room = 0;
  EXPECT_LT(request_time(cluster, group, room), kFlat);
  EXPECT_LE(rank.stats().pulls_waiting, 1'000U);
  EXPECT_TRUE(eventually([&] { return rank.stats().peers_lost > 0; }));  // its queue was full
  flood.request_stop();
  flood.join();
  EXPECT_TRUE(eventually([&] { return rank.stats().pulls_waiting == 0; }));
  cluster.expect_works(group, ++room);
}

TEST_F(SecurityTest, PeersBeyondTheLimitsAreToldSo) {
  FaultSetup options = setup("", "");
  options.prefill.limits.max_peers_per_address = 1;
  FaultCluster cluster{options};
  ASSERT_TRUE(cluster.start().ok());
  const GroupId group = cluster.connect();
  RawPeer peer{cluster.prefills[0]->member()};
  ASSERT_TRUE(peer.send(hello_for(cluster)));
  const auto answer = peer.receive();
  ASSERT_TRUE(answer && answer->first == wire::MessageType::bye);
  const Error error = wire::decode<wire::Bye>(answer->second).value().error;
  EXPECT_EQ(error.code, ErrorCode::resource_exhausted);
  EXPECT_EQ(error.message, "1 peers are connected from 127.0.0.1, max_peers_per_address is 1");
  cluster.expect_works(group, 1);
}

}  // namespace
}  // namespace kvshard::test
