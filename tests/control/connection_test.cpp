#include "control/connection.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "support/manual_clock.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;
using wire::MessageType;

const SocketAddress kAnyPort = *SocketAddress::parse("127.0.0.1", 0);

// What a connection said, and what to do when it says it.
struct Recorder final : ConnectionListener {
  int opened{0};
  std::vector<std::pair<MessageType, std::vector<std::byte>>> frames;
  std::vector<Error> closed;
  std::function<void()> on_open = [] {};
  std::function<void()> on_frame = [] {};
  std::function<void()> on_closed = [] {};

  void connection_open() noexcept override {
    ++opened;
    on_open();
  }
  void connection_frame(MessageType type, std::span<const std::byte> payload) noexcept override {
    frames.emplace_back(type, std::vector<std::byte>{payload.begin(), payload.end()});
    on_frame();
  }
  void connection_closed(Error error) noexcept override {
    closed.push_back(std::move(error));
    on_closed();
  }
  [[nodiscard]] std::uint64_t ping(std::size_t i) const {
    return wire::decode<wire::Ping>(frames.at(i).second).value_or(wire::Ping{}).sequence;
  }
};

// A connected pair of TCP sockets: one is a Connection's, the other is a plain one in the test's hand.
class ConnectionTest : public testing::Test {
 protected:
  ConnectionTest() {
    listener_ =
        std::move(Listener::create(*loop_, kAnyPort, [this](UniqueFd socket, std::string peer) {
          accepted_.push_back(std::move(socket));
          accepted_peers_.push_back(std::move(peer));
        })).value();
    address_ = *SocketAddress::parse("127.0.0.1", listener_->port());
  }

  // Real time bounds a wait that never ends; nothing is decided by it.
  template <class Condition>
  bool run_until(Condition condition) {
    const auto give_up = std::chrono::steady_clock::now() + 20s;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      loop_->run_once(10ms);
    }
    return true;
  }

  void adopt(ConnectionLimits limits = {}) {
    peer_ = UniqueFd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    ASSERT_EQ(::connect(peer_.get(), address_.data(), address_.size()), 0);
    ASSERT_TRUE(run_until([&] { return !accepted_.empty(); }));
    auto made = Connection::adopt(*loop_, std::move(accepted_.back()), recorder_, limits);
    accepted_.clear();
    ASSERT_TRUE(made) << made.error().message;
    connection_ = std::move(*made);
  }

  void peer_writes(std::span<const std::byte> bytes) const {
    ASSERT_EQ(::send(peer_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Reads until the end of the stream, with the loop running beside.
  std::vector<std::byte> peer_reads_to_end() {
    std::vector<std::byte> all;
    std::array<std::byte, 65536> buffer;
    EXPECT_TRUE(run_until([&] {
      for (;;) {
        const auto got = ::recv(peer_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got < 0) return false;
        if (got == 0) return true;
        all.insert(all.end(), buffer.begin(), buffer.begin() + got);
      }
    }));
    return all;
  }
  // Closes so that the other side sees a reset.
  void reset_peer() {
    const linger now{.l_onoff = 1, .l_linger = 0};
    ASSERT_EQ(::setsockopt(peer_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now), 0);
    peer_.reset();
  }
  static std::vector<std::byte> ping(std::uint64_t sequence) {
    std::vector<std::byte> bytes;
    wire::encode(wire::Ping{sequence}, bytes);
    return bytes;
  }

  ManualClock clock_;
  std::unique_ptr<EventLoop> loop_ = std::move(EventLoop::create(clock_)).value();
  std::vector<UniqueFd> accepted_;
  std::vector<std::string> accepted_peers_;
  std::unique_ptr<Listener> listener_;
  SocketAddress address_;
  Recorder recorder_;
  UniqueFd peer_;
  std::unique_ptr<Connection> connection_;
};

TEST_F(ConnectionTest, ConnectsAndExchangesMessages) {
  auto made = Connection::connect(*loop_, address_, clock_.now() + 1s, recorder_);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_TRUE((*made)->send(wire::Ping{1}));  // queued until it opens
  EXPECT_EQ(recorder_.opened, 0);             // never from within a call
  ASSERT_TRUE(run_until([&] { return recorder_.opened == 1 && !accepted_.empty(); }));
  EXPECT_EQ((*made)->peer(), "127.0.0.1:" + std::to_string(listener_->port()));

  Recorder other;
  auto adopted = Connection::adopt(*loop_, std::move(accepted_[0]), other);
  ASSERT_TRUE(adopted) << adopted.error().message;
  EXPECT_EQ((*adopted)->peer(), accepted_peers_[0]);
  EXPECT_TRUE((*made)->send(wire::Ping{2}));
  EXPECT_TRUE((*adopted)->send(wire::Abort{7, {ErrorCode::cancelled, "x"}}));
  ASSERT_TRUE(run_until([&] { return other.frames.size() == 2 && recorder_.frames.size() == 1; }));
  EXPECT_EQ(other.ping(0), 1U);
  EXPECT_EQ(other.ping(1), 2U);
  EXPECT_EQ(recorder_.frames[0].first, MessageType::abort);
  EXPECT_EQ(other.opened, 0);

  clock_.advance(1h);  // the connect's deadline has no meaning any more
  loop_->run_once(0ns);
  EXPECT_TRUE(recorder_.closed.empty());
}

TEST_F(ConnectionTest, SendsTheMessagesOfOneTurnInOrder) {
  adopt();
  std::vector<std::byte> expected;
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(connection_->send(wire::Ping{i}));
    wire::encode(wire::Ping{i}, expected);
  }
  EXPECT_EQ(connection_->queued_bytes(), expected.size());  // nothing left before the turn's end
  loop_->run_once(0ns);
  EXPECT_EQ(connection_->queued_bytes(), 0U);
  connection_->close();
  EXPECT_EQ(peer_reads_to_end(), expected);
}

TEST_F(ConnectionTest, ReadsAFrameThatComesByteByByte) {
  adopt();
  const auto bytes = ping(0x0807060504030201);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_TRUE(recorder_.frames.empty()) << "after " << i << " bytes";
    peer_writes(std::span{bytes}.subspan(i, 1));
    ASSERT_TRUE(run_until([&] { return loop_->run_once(0ns); }));
  }
  ASSERT_EQ(recorder_.frames.size(), 1U);
  EXPECT_EQ(recorder_.ping(0), 0x0807060504030201U);
}

TEST_F(ConnectionTest, ReadsManyFramesOfOneWrite) {
  adopt();
  std::vector<std::byte> bytes;
  for (std::uint64_t i = 0; i < 10'000; ++i) wire::encode(wire::Ping{i}, bytes);
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return recorder_.frames.size() == 10'000; }));
  for (std::uint64_t i = 0; i < 10'000; ++i) ASSERT_EQ(recorder_.ping(i), i);
}

TEST_F(ConnectionTest, ReadsFramesLargerThanAReadAndMixesThemWithSmallOnes) {
  adopt();
  wire::Ready large{.last = true};
  large.side_data.resize(wire::kMaxSideDataBytes);
  std::vector<std::byte> bytes;
  for (std::uint64_t i = 0; i < 6; ++i) {
    wire::encode(wire::Ping{i}, bytes);
    large.piece = i;
    wire::encode(large, bytes);
  }
  std::size_t sent = 0;
  ASSERT_TRUE(run_until([&] {
    const auto put =
        ::send(peer_.get(), bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put > 0) sent += static_cast<std::size_t>(put);
    return recorder_.frames.size() == 12;
  }));
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(recorder_.ping(2 * i), i);
    const auto ready = wire::decode<wire::Ready>(recorder_.frames[2 * i + 1].second);
    ASSERT_TRUE(ready) << ready.error().message;
    EXPECT_EQ(ready->piece, i);
    EXPECT_EQ(ready->side_data.size(), wire::kMaxSideDataBytes);
  }
}

TEST_F(ConnectionTest, WritesOnWhenASlowPeerReads) {
  adopt();
  wire::Ready large{.last = true};
  std::vector<std::byte> expected;
  std::uint64_t piece = 0;
  while (connection_->queued_bytes() < 256U << 10) {  // until the socket takes no more
    large.piece = piece++;
    large.side_data.assign(wire::kMaxSideDataBytes, static_cast<std::byte>(piece));
    ASSERT_TRUE(connection_->send(large));
    wire::encode(large, expected);
    loop_->run_once(0ns);
  }
  std::vector<std::byte> got;
  std::array<std::byte, 10'000> buffer;
  ASSERT_TRUE(run_until([&] {
    for (;;) {
      const auto n = ::recv(peer_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (n <= 0) break;
      got.insert(got.end(), buffer.begin(), buffer.begin() + n);
    }
    return got.size() == expected.size();
  }));
  EXPECT_TRUE(got == expected);
  EXPECT_EQ(connection_->queued_bytes(), 0U);
}

TEST_F(ConnectionTest, ClosesWhenAPeerThatDoesNotReadFillsTheQueue) {
  adopt({.max_queued_bytes = 200'000});
  wire::Ready large{.last = true};
  large.side_data.resize(wire::kMaxSideDataBytes);
  Status status;
  while (status) {
    status = connection_->send(large);
    if (status) loop_->run_once(0ns);
    ASSERT_LE(connection_->queued_bytes(), 200'000U);
  }
  EXPECT_EQ(status.error().code, ErrorCode::resource_exhausted);
  EXPECT_NE(status.error().message.find("at most 200000 allowed"), std::string::npos)
      << status.error().message;
  EXPECT_TRUE(recorder_.closed.empty());  // told at the turn's end, never inside send()
  EXPECT_EQ(connection_->send(wire::Ping{}).error().code, ErrorCode::unavailable);
  loop_->run_once(0ns);
  ASSERT_EQ(recorder_.closed.size(), 1U);
  EXPECT_EQ(recorder_.closed[0].message, status.error().message);
}

TEST_F(ConnectionTest, RefusesToSendWhatIsBeyondTheWiresLimits) {
  adopt();
  wire::Ready ready{.last = true};
  ready.side_data.resize(wire::kMaxSideDataBytes + 1);
  EXPECT_EQ(connection_->send(ready).error().code, ErrorCode::invalid_argument);
  EXPECT_TRUE(connection_->send(wire::Ping{}));  // the connection goes on
  EXPECT_EQ(connection_->queued_bytes(), 16U);
}

TEST_F(ConnectionTest, DeliversWhatCameBeforeTheEndOfTheStream) {
  adopt();
  peer_writes(ping(5));
  peer_.reset();
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  ASSERT_EQ(recorder_.frames.size(), 1U);
  EXPECT_EQ(recorder_.closed[0].code, ErrorCode::unavailable);
  EXPECT_EQ(recorder_.closed[0].message, connection_->peer() + " closed the connection");
  loop_->run_once(0ns);
  EXPECT_EQ(recorder_.closed.size(), 1U);
  EXPECT_TRUE(connection_->closed());
}

TEST_F(ConnectionTest, TellsOfAStreamThatEndsWithinAFrame) {
  adopt();
  const auto bytes = ping(5);
  peer_writes(std::span{bytes}.first(11));
  peer_.reset();
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  EXPECT_EQ(recorder_.closed[0].message,
            connection_->peer() + " closed the connection 11 bytes into a frame");
}

// acceptance 42
TEST_F(ConnectionTest, ClosesAtABadFrameHeaderAndDeliversNothingBehindIt) {
  adopt();
  auto bytes = ping(1);
  const auto bad = std::array{std::byte{0xff}, std::byte{0xff}, std::byte{0xff}, std::byte{0xff},
                              std::byte{9},    std::byte{0},    std::byte{0},    std::byte{0}};
  bytes.insert(bytes.end(), bad.begin(), bad.end());
  const auto behind = ping(2);
  bytes.insert(bytes.end(), behind.begin(), behind.end());
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  EXPECT_EQ(recorder_.frames.size(), 1U);
  EXPECT_EQ(recorder_.closed[0].code, ErrorCode::invalid_argument);
  EXPECT_NE(recorder_.closed[0].message.find("a frame of 4294967303 bytes"), std::string::npos)
      << recorder_.closed[0].message;
}

TEST_F(ConnectionTest, HonoursItsOwnFrameLimit) {
  adopt({.max_frame_bytes = 16});
  peer_writes(ping(1));
  wire::Bye bye{.error = {ErrorCode::internal, "long"}};
  std::vector<std::byte> bytes;
  wire::encode(bye, bytes);
  bye.error.message = "much too long";
  wire::encode(bye, bytes);
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  EXPECT_EQ(recorder_.frames.size(), 2U);
}

TEST_F(ConnectionTest, TellsOfAReset) {
  adopt();
  reset_peer();
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  EXPECT_EQ(recorder_.closed[0].code, ErrorCode::unavailable);
  EXPECT_NE(recorder_.closed[0].message.find("reset"), std::string::npos)
      << recorder_.closed[0].message;
}

TEST_F(ConnectionTest, ReadsAGoodbyeAlthoughItsOwnWritesFail) {
  adopt();
  // The peer says why and resets after this turn has looked for input, before it writes.
  struct Goodbye final : EventLoop::TurnEndHandler {
    std::function<void()> call;
    void turn_end() noexcept override { call(); }
  } goodbye;
  goodbye.call = [&] {
    std::vector<std::byte> bytes;
    wire::encode(wire::Bye{{ErrorCode::failed_precondition, "epoch 3 is over"}}, bytes);
    peer_writes(bytes);
    reset_peer();
  };
  loop_->at_turn_end(goodbye);
  ASSERT_TRUE(connection_->send(wire::Ping{}));
  loop_->run_once(0ns);
  ASSERT_EQ(recorder_.closed.size(), 1U);
  ASSERT_EQ(recorder_.frames.size(), 1U);
  EXPECT_EQ(recorder_.frames[0].first, MessageType::bye);
}

TEST_F(ConnectionTest, TellsThatAConnectWasRefused) {
  listener_.reset();
  auto made = Connection::connect(*loop_, address_, clock_.now() + 1s, recorder_);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_TRUE(recorder_.closed.empty());
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  EXPECT_EQ(recorder_.opened, 0);
  EXPECT_EQ(recorder_.closed[0].code, ErrorCode::unavailable);
  EXPECT_EQ(recorder_.closed[0].message,
            "connect to " + address_.to_string() + ": Connection refused");
}

TEST_F(ConnectionTest, TellsThatAConnectTookTooLong) {
  // A listener whose backlog is full answers no further connect.
  UniqueFd full{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  ASSERT_EQ(::bind(full.get(), kAnyPort.data(), kAnyPort.size()), 0);
  ASSERT_EQ(::listen(full.get(), 0), 0);
  const SocketAddress silent = *SocketAddress::local(full.get());
  std::vector<UniqueFd> fillers;
  for (int i = 0; i < 4; ++i) {
    fillers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    (void)::connect(fillers.back().get(), silent.data(), silent.size());
  }
  auto made = Connection::connect(*loop_, silent, clock_.now() + 1500ms, recorder_);
  ASSERT_TRUE(made) << made.error().message;
  clock_.advance(1499ms);
  loop_->run_once(0ns);
  if (recorder_.opened != 0) GTEST_SKIP() << "this machine's backlog does not fill";
  EXPECT_TRUE(recorder_.closed.empty());
  clock_.advance(1ms);
  loop_->run_once(0ns);
  ASSERT_EQ(recorder_.closed.size(), 1U);
  EXPECT_EQ(recorder_.closed[0].code, ErrorCode::deadline_exceeded);
  EXPECT_EQ(recorder_.closed[0].message,
            "connect to " + silent.to_string() + ": no answer within 1500 ms");
}

TEST_F(ConnectionTest, ReportsTheTimeOfTheLastByte) {
  adopt();
  const TimePoint start = clock_.now();
  EXPECT_EQ(connection_->last_received(), start);
  clock_.advance(3s);
  loop_->run_once(0ns);
  EXPECT_EQ(connection_->last_received(), start);
  const auto bytes = ping(1);
  peer_writes(std::span{bytes}.first(1));
  ASSERT_TRUE(run_until([&] { return connection_->last_received() != start; }));
  EXPECT_EQ(connection_->last_received(), start + 3s);
}

TEST_F(ConnectionTest, ExcusesAPauseOfOurOwn) {
  adopt();
  const TimePoint start = clock_.now();
  clock_.advance(5s);
  loop_->run_once(0ns);
  connection_->excuse(3s);
  EXPECT_EQ(connection_->last_received(), start + 3s);
  connection_->excuse(3s);  // part of it was before the last byte
  EXPECT_EQ(connection_->last_received(), start + 5s);
}

TEST_F(ConnectionTest, IsSilentAfterClose) {
  adopt();
  peer_writes(ping(1));
  ASSERT_TRUE(connection_->send(wire::Ping{1}));
  connection_->close();
  connection_->close();
  EXPECT_TRUE(connection_->closed());
  EXPECT_EQ(connection_->send(wire::Ping{}).error().code, ErrorCode::unavailable);
  loop_->run_once(0ns);
  EXPECT_TRUE(recorder_.frames.empty());
  EXPECT_TRUE(recorder_.closed.empty());
}

TEST_F(ConnectionTest, WritesItsQueueBeforeItCloses) {
  adopt();
  peer_writes(ping(9));  // unread input must not turn the close into a reset
  const wire::Bye bye{{ErrorCode::failed_precondition, "layer count 61, not 64"}};
  ASSERT_TRUE(connection_->send(bye));
  connection_->flush_and_close();
  connection_->flush_and_close();
  std::vector<std::byte> expected;
  wire::encode(bye, expected);
  EXPECT_EQ(peer_reads_to_end(), expected);
  EXPECT_TRUE(recorder_.closed.empty());
}

// Any listener call may destroy the connection; asan watches.
TEST_F(ConnectionTest, MayBeDestroyedWhenAFrameComes) {
  adopt();
  recorder_.on_frame = [&] { connection_.reset(); };
  std::vector<std::byte> bytes = ping(1);
  wire::encode(wire::Ping{2}, bytes);
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return connection_ == nullptr; }));
  loop_->run_once(0ns);
  EXPECT_EQ(recorder_.frames.size(), 1U);
  EXPECT_TRUE(recorder_.closed.empty());
}

TEST_F(ConnectionTest, MayBeClosedWhenAFrameComes) {
  adopt();
  recorder_.on_frame = [&] { connection_->close(); };
  std::vector<std::byte> bytes = ping(1);
  wire::encode(wire::Ping{2}, bytes);
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return connection_->closed(); }));
  loop_->run_once(0ns);
  EXPECT_EQ(recorder_.frames.size(), 1U);
  EXPECT_TRUE(recorder_.closed.empty());
}

TEST_F(ConnectionTest, MayBeDestroyedWhenItOpens) {
  auto made = Connection::connect(*loop_, address_, clock_.now() + 1s, recorder_);
  ASSERT_TRUE(made);
  ASSERT_TRUE((*made)->send(wire::Ping{1}));
  recorder_.on_open = [&] { made->reset(); };
  ASSERT_TRUE(run_until([&] { return recorder_.opened == 1; }));
  loop_->run_once(0ns);
  EXPECT_TRUE(recorder_.closed.empty());
}

TEST_F(ConnectionTest, MayBeDestroyedWhenItCloses) {
  adopt();
  recorder_.on_closed = [&] { connection_.reset(); };
  peer_.reset();
  ASSERT_TRUE(run_until([&] { return connection_ == nullptr; }));
  loop_->run_once(0ns);
  EXPECT_EQ(recorder_.closed.size(), 1U);
}

TEST_F(ConnectionTest, MayBeDestroyedWhenItsQueueOverflows) {
  adopt({.max_queued_bytes = 8});
  recorder_.on_closed = [&] { connection_.reset(); };
  EXPECT_FALSE(connection_->send(wire::Ping{1}));
  loop_->run_once(0ns);
  EXPECT_EQ(connection_, nullptr);
}

TEST_F(ConnectionTest, MayBeDestroyedWhenItsConnectFails) {
  listener_.reset();
  auto made = Connection::connect(*loop_, address_, clock_.now() + 1s, recorder_);
  ASSERT_TRUE(made);
  recorder_.on_closed = [&] { made->reset(); };
  ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
  loop_->run_once(0ns);
}

TEST_F(ConnectionTest, ADestroyedConnectionIsNotReachedByTheSameTurnsEvents) {
  // Two connections have input in one turn; whichever hears first destroys the other.
  adopt();
  auto first = std::move(connection_);
  const UniqueFd first_peer = std::move(peer_);
  recorder_.on_frame = [&] { connection_.reset(); };
  Recorder first_recorder = std::move(recorder_);
  recorder_ = {};
  adopt();
  recorder_.on_frame = [&] { first.reset(); };
  const auto bytes = ping(1);
  ASSERT_EQ(::send(first_peer.get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  peer_writes(bytes);
  ASSERT_TRUE(run_until([&] { return first == nullptr || connection_ == nullptr; }));
  loop_->run_once(0ns);
  EXPECT_NE(first == nullptr, connection_ == nullptr);
}

TEST_F(ConnectionTest, SurvivesItsPeersConnectionsAHundredTimes) {
  const auto open_fds = [] {
    int count = 0;
    for (int fd = 0; fd < 256; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
  };
  const int before = open_fds();
  for (int round = 0; round < 100; ++round) {
    adopt();
    peer_writes(ping(static_cast<std::uint64_t>(round)));
    if (round % 2 == 0) {
      peer_.reset();
    } else {
      reset_peer();
    }
    recorder_.closed.clear();
    ASSERT_TRUE(run_until([&] { return !recorder_.closed.empty(); }));
    connection_.reset();
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(SocketAddressTest, ParsesNumbersAndLocalhostOnly) {
  EXPECT_EQ(SocketAddress::parse("10.1.2.3", 4711)->to_string(), "10.1.2.3:4711");
  EXPECT_EQ(SocketAddress::parse("::1", 4711)->to_string(), "[::1]:4711");
  EXPECT_EQ(SocketAddress::parse("localhost", 1)->to_string(), "127.0.0.1:1");
  EXPECT_EQ(SocketAddress::parse("::1", 4711)->port(), 4711);
  for (const std::string_view host : {"", "example.org", "10.1.2.3.4", "[::1]", "10.1.2.3 "}) {
    const auto address = SocketAddress::parse(host, 1);
    ASSERT_FALSE(address) << host;
    EXPECT_EQ(address.error().code, ErrorCode::invalid_argument);
    EXPECT_EQ(address.error().message,
              "host \"" + std::string{host} + "\" is neither a numeric address nor localhost");
  }
  EXPECT_FALSE(SocketAddress::parse(std::string_view{"10.1.2.3\0x", 10}, 1));
}

class ListenerTest : public ConnectionTest {
 protected:
  // A blocking client; -1 when this process has no descriptor left for it.
  [[nodiscard]] UniqueFd client() const {
    UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    EXPECT_EQ(::connect(fd.get(), address_.data(), address_.size()), 0) << std::strerror(errno);
    return fd;
  }
};

TEST_F(ListenerTest, AcceptsAllThatWait) {
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 100; ++i) clients.push_back(client());
  ASSERT_TRUE(run_until([&] { return accepted_.size() == 100; }));
}

TEST_F(ListenerTest, NamesAnAddressThatIsTaken) {
  const auto second = Listener::create(*loop_, address_, [](UniqueFd, std::string) {});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::unavailable);
  EXPECT_EQ(second.error().message,
            "listen on " + address_.to_string() + ": bind: Address already in use");
}

TEST_F(ListenerTest, TakesItsPortAgainAtOnce) {
  adopt();
  connection_->close();  // this end closes first and so keeps the port busy for a while
  EXPECT_TRUE(peer_reads_to_end().empty());
  peer_.reset();
  const SocketAddress same = address_;
  listener_.reset();
  EXPECT_TRUE(Listener::create(*loop_, same, [](UniqueFd, std::string) {}));
}

TEST_F(ListenerTest, MayBeDestroyedWhenAConnectionComes) {
  const auto token = std::make_shared<int>(0);
  std::unique_ptr<Listener> listener;
  int calls = 0;
  listener = std::move(Listener::create(*loop_, kAnyPort, [&, token](UniqueFd, std::string) {
               listener.reset();
               ++calls;
               EXPECT_EQ(token.use_count(), 2);  // this function is still alive
             })).value();
  address_ = *SocketAddress::parse("127.0.0.1", listener->port());
  const UniqueFd first = client();
  const UniqueFd second = client();
  ASSERT_TRUE(run_until([&] { return listener == nullptr; }));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(token.use_count(), 1);
}

std::vector<std::string>& logged() {
  static std::vector<std::string> lines;
  return lines;
}

TEST_F(ListenerTest, WaitsAndLogsOnceWhenDescriptorsRunOut) {
#ifdef __SANITIZE_ADDRESS__  // our asan builds have ubsan too, which checks a vptr through a pipe
  GTEST_SKIP() << "the undefined-behaviour sanitizer needs descriptors itself";
#endif
  logged().clear();
  set_log_hook([](void*, LogLevel, std::string_view line) noexcept { logged().emplace_back(line); },
               nullptr);
  const UniqueFd waiting = client();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur =
      static_cast<rlim_t>(UniqueFd{::dup(waiting.get())}.get());  // the lowest free number
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);

  ASSERT_TRUE(run_until([&] { return !logged().empty(); }));
  EXPECT_FALSE(loop_->run_once(0ns));  // it does not spin on what it cannot accept
  for (int i = 0; i < 20; ++i) {
    clock_.advance(100ms);
    loop_->run_once(0ns);  // the timer
    loop_->run_once(0ns);  // the next failure
  }
  EXPECT_EQ(logged().size(), 1U);
  EXPECT_NE(logged()[0].find("Too many open files"), std::string::npos) << logged()[0];
  EXPECT_TRUE(accepted_.empty());

  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  clock_.advance(100ms);
  ASSERT_TRUE(run_until([&] { return accepted_.size() == 1; }));
  set_log_hook(nullptr, nullptr);
}

}  // namespace
}  // namespace kvshard
