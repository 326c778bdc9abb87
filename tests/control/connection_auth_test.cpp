#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/connection.hpp"
#include "support/manual_clock.hpp"
#include "wire/samples.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;
using wire::MessageType;
using Bytes = std::vector<std::byte>;
using Frames = std::vector<Bytes>;

std::shared_ptr<Secrets> secrets(std::string_view text) {
  auto made = std::make_shared<Secrets>();
  made->push_back(std::move(HmacKey::create(std::as_bytes(std::span{text}))).value());
  return made;
}

struct Recorder final : ConnectionListener {
  int opened{0};
  std::vector<std::pair<MessageType, Bytes>> frames;
  std::vector<Error> closed;
  std::function<void()> on_open = [] {};

  void connection_open() noexcept override {
    ++opened;
    on_open();
  }
  void connection_frame(MessageType type, std::span<const std::byte> payload) noexcept override {
    frames.emplace_back(type, Bytes{payload.begin(), payload.end()});
  }
  void connection_closed(Error error) noexcept override { closed.push_back(std::move(error)); }
};

// A decode rank's connection and a prefill rank's, with the network between them in the test's hands.
class ConnectionAuthTest : public testing::Test {
 protected:
  // What becomes of a frame on its way: nothing, itself, or several.
  using Network = std::function<Frames(bool to_prefill, int number, Bytes frame)>;

  void start(std::shared_ptr<Secrets> decode_secrets, std::shared_ptr<Secrets> prefill_secrets) {
    const auto listener = Listener::create(
        *loop_, *SocketAddress::parse("127.0.0.1", 0),
        [&](UniqueFd socket, const std::string&) { wires_[0].fd = std::move(socket); });
    ASSERT_TRUE(listener);
    auto made = Connection::connect(*loop_, *SocketAddress::parse("127.0.0.1", (*listener)->port()),
                                    clock_.now() + 1s, at_decode_, {}, std::move(decode_secrets));
    ASSERT_TRUE(made);
    decode_ = std::move(*made);
    while (!wires_[0].fd) loop_->run_once(10ms);
    std::array<int, 2> pair{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
    wires_[1].fd = UniqueFd{pair[0]};
    auto adopted =
        Connection::adopt(*loop_, UniqueFd{pair[1]}, at_prefill_, {}, std::move(prefill_secrets));
    ASSERT_TRUE(adopted);
    prefill_ = std::move(*adopted);
  }

  // Turns the loop and carries frames until nothing moves any more.
  void settle() {
    for (int idle = 0; idle < 3;) {
      const bool turned = loop_->run_once(0ns);
      const bool to_prefill = carry(0), to_decode = carry(1);
      idle = turned || to_prefill || to_decode ? 0 : idle + 1;
    }
  }

  bool carry(int from) {
    Wire& wire = wires_[from];
    if (!wire.fd) return false;
    std::array<std::byte, 65536> buffer;
    const auto got = ::recv(wire.fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0) return false;
    if (got == 0) {
      (void)::shutdown(wires_[1 - from].fd.get(), SHUT_WR);
      wire.fd.reset();
      return true;
    }
    wire.bytes.insert(wire.bytes.end(), buffer.begin(), buffer.begin() + got);
    while (wire.bytes.size() >= wire::kFrameHeaderBytes) {
      const auto header =
          wire::decode_header(std::span{wire.bytes}.first<wire::kFrameHeaderBytes>());
      const std::size_t size = wire::kFrameHeaderBytes + header->payload_bytes;
      if (wire.bytes.size() < size) break;
      const auto end = wire.bytes.begin() + static_cast<std::ptrdiff_t>(size);
      Bytes frame{wire.bytes.begin(), end};
      wire.bytes.erase(wire.bytes.begin(), end);
      for (const Bytes& passed : network_(from == 0, wire.frames++, std::move(frame))) {
        if (wires_[1 - from].fd)
          (void)::send(wires_[1 - from].fd.get(), passed.data(), passed.size(), MSG_NOSIGNAL);
      }
    }
    return true;
  }

  struct Wire {
    UniqueFd fd;
    Bytes bytes;
    int frames{0};
  };
  ManualClock clock_;
  std::unique_ptr<EventLoop> loop_ = std::move(EventLoop::create(clock_)).value();
  std::array<Wire, 2> wires_;  // [0]: the decode side's
  Network network_ = [](bool, int, Bytes frame) { return Frames{std::move(frame)}; };
  Recorder at_decode_, at_prefill_;
  std::unique_ptr<Connection> decode_, prefill_;
};

constexpr std::string_view kSecret = "the one shared secret";

TEST_F(ConnectionAuthTest, OpensOnBothSidesAndCarriesMessagesAsTheyWere) {
  start(secrets(kSecret), secrets(kSecret));
  const Status early = decode_->send(wire::Ping{1});
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, ErrorCode::failed_precondition);
  at_decode_.on_open = [&] { EXPECT_TRUE(decode_->send(wire::sample_hello())); };
  at_prefill_.on_open = [&] { EXPECT_TRUE(prefill_->send(wire::Ping{5})); };
  settle();
  EXPECT_EQ(at_decode_.opened, 1);
  EXPECT_EQ(at_prefill_.opened, 1);
  ASSERT_EQ(at_prefill_.frames.size(), 1U);
  const Bytes hello = wire::frame_of(wire::sample_hello());
  EXPECT_TRUE(std::ranges::equal(at_prefill_.frames[0].second, wire::payload_of(hello)));
  ASSERT_EQ(at_decode_.frames.size(), 1U);
  EXPECT_EQ(wire::decode<wire::Ping>(at_decode_.frames[0].second)->sequence, 5U);
  for (std::uint64_t i = 0; i < 100; ++i) ASSERT_TRUE(decode_->send(wire::Ping{i}));
  settle();
  ASSERT_EQ(at_prefill_.frames.size(), 101U);
  EXPECT_EQ(wire::decode<wire::Ping>(at_prefill_.frames.back().second)->sequence, 99U);
  clock_.advance(1h);  // the connect's deadline has no meaning any more
  settle();
  EXPECT_TRUE(at_decode_.closed.empty());
}

// acceptance 43
TEST_F(ConnectionAuthTest, AWrongSecretIsRefusedAndBothSidesSayWhy) {
  start(secrets("some other secret"), secrets(kSecret));
  settle();
  ASSERT_EQ(at_decode_.closed.size(), 1U);
  ASSERT_EQ(at_prefill_.closed.size(), 1U);
  for (const Recorder* side : {&at_decode_, &at_prefill_}) {
    EXPECT_EQ(side->opened, 0);
    EXPECT_TRUE(side->frames.empty());
    EXPECT_EQ(side->closed[0].code, ErrorCode::failed_precondition);
    EXPECT_NE(side->closed[0].message.find("the decode rank's secret is not the prefill rank's"),
              std::string::npos)
        << side->closed[0].message;
  }
}

// acceptance 43
TEST_F(ConnectionAuthTest, ADecodeRankWithoutASecretIsRefusedByOneWithASecret) {
  at_decode_.on_open = [&] { EXPECT_TRUE(decode_->send(wire::sample_hello())); };
  start(nullptr, secrets(kSecret));
  settle();
  EXPECT_TRUE(at_prefill_.frames.empty());
  ASSERT_EQ(at_prefill_.closed.size(), 1U);
  EXPECT_NE(at_prefill_.closed[0].message.find("the decode rank uses no secret"), std::string::npos)
      << at_prefill_.closed[0].message;
  ASSERT_EQ(at_decode_.frames.size(), 1U);
  ASSERT_EQ(at_decode_.frames[0].first, MessageType::bye);
  EXPECT_EQ(wire::decode<wire::Bye>(at_decode_.frames[0].second)->error.message,
            "the decode rank uses no secret, and this prefill rank requires one");
}

// acceptance 43
TEST_F(ConnectionAuthTest, ADecodeRankWithASecretRefusesAPrefillRankWithoutOne) {
  start(secrets(kSecret), nullptr);
  settle();
  EXPECT_EQ(at_decode_.opened, 0);
  for (const Recorder* side : {&at_decode_, &at_prefill_}) {
    EXPECT_TRUE(side->frames.empty());
    ASSERT_EQ(side->closed.size(), 1U);
    EXPECT_EQ(side->closed[0].code, ErrorCode::failed_precondition);
    EXPECT_NE(side->closed[0].message.find("requires a secret, and this prefill rank has none"),
              std::string::npos)
        << side->closed[0].message;
  }
}

// acceptance 43: nothing but the first three messages of a handshake passes before both are refused.
TEST_F(ConnectionAuthTest, AFutureVersionIsRefusedNamingBoth) {
  int passed = 0;
  network_ = [&](bool, int, Bytes frame) {
    ++passed;
    if (passed == 1)
      frame[wire::kFrameHeaderBytes + 4] = frame[wire::kFrameHeaderBytes + 6] =
          std::byte{9};  // version_min, version_max
    return Frames{std::move(frame)};
  };
  start(secrets(kSecret), secrets(kSecret));
  settle();
  EXPECT_EQ(passed, 2);  // AUTHENTICATE, BYE
  for (const Recorder* side : {&at_decode_, &at_prefill_}) {
    ASSERT_EQ(side->closed.size(), 1U);
    EXPECT_EQ(side->closed[0].code, ErrorCode::unsupported);
    EXPECT_NE(side->closed[0].message.find("versions 9 to 9, this side"), std::string::npos)
        << side->closed[0].message;
  }
}

// acceptance 42
TEST_F(ConnectionAuthTest, AFrameThatIsChangedDoubledLostOrSwappedEndsTheConnection) {
  using Spoil = std::function<Frames(Bytes frame)>;
  Bytes held;
  const std::pair<const char*, Spoil> kinds[] = {{"changed",
                                                  [](Bytes frame) {
                                                    frame[wire::kFrameHeaderBytes] ^=
                                                        std::byte{0x40};
                                                    return Frames{frame};
                                                  }},
                                                 {"doubled",
                                                  [](Bytes frame) {
                                                    return Frames{frame, frame};
                                                  }},
                                                 {"lost", [](Bytes) { return Frames{}; }},
                                                 {"swapped", [&](Bytes frame) {
                                                    held = std::move(frame);
                                                    return Frames{};
                                                  }}};
  for (const auto& [name, spoil] : kinds) {
    SCOPED_TRACE(name);
    at_decode_ = at_prefill_ = {};
    wires_ = {};
    held.clear();
    start(secrets(kSecret), secrets(kSecret));
    settle();
    ASSERT_EQ(at_decode_.opened, 1);
    network_ = [&](bool to_prefill, int number, Bytes frame) {
      if (to_prefill && number == 3) return spoil(std::move(frame));  // after the handshake's two
      Frames passed{std::move(frame)};
      if (!held.empty()) passed.push_back(std::exchange(held, {}));
      return passed;
    };
    for (std::uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(decode_->send(wire::Ping{i}));
    settle();
    ASSERT_EQ(at_prefill_.closed.size(), 1U);
    EXPECT_NE(at_prefill_.closed[0].message.find("the MAC of frame"), std::string::npos)
        << at_prefill_.closed[0].message;
    EXPECT_LE(at_prefill_.frames.size(), 2U);  // only what came before
    for (std::size_t i = 0; i < at_prefill_.frames.size(); ++i)
      EXPECT_EQ(wire::decode<wire::Ping>(at_prefill_.frames[i].second)->sequence, i);
    ASSERT_EQ(at_decode_.frames.size(), 1U);  // told why, under a MAC
    EXPECT_EQ(at_decode_.frames[0].first, MessageType::bye);
    network_ = [](bool, int, Bytes frame) { return Frames{std::move(frame)}; };
  }
}

// acceptance 42: before a peer has proved itself it gets two kilobytes.
TEST_F(ConnectionAuthTest, AStrangerCannotMakeUsHoldMuch) {
  start(nullptr, secrets(kSecret));
  wire::Bye bye{{ErrorCode::internal, std::string(wire::kMaxMessageTextBytes, 'x')}};
  Bytes frame = wire::frame_of(bye);
  frame[1] = std::byte{0x10};  // 4 KiB and some
  ASSERT_EQ(::send(wires_[1].fd.get(), frame.data(), frame.size(), 0),
            static_cast<ssize_t>(frame.size()));
  settle();
  ASSERT_EQ(at_prefill_.closed.size(), 1U);
  EXPECT_EQ(at_prefill_.closed[0].code, ErrorCode::invalid_argument);
  EXPECT_NE(at_prefill_.closed[0].message.find("at most 2048 allowed"), std::string::npos)
      << at_prefill_.closed[0].message;
}

TEST_F(ConnectionAuthTest, TheConnectsDeadlineCoversTheHandshake) {
  network_ = [](bool, int, Bytes) { return Frames{}; };  // somebody who never answers
  start(secrets(kSecret), secrets(kSecret));
  settle();
  clock_.advance(1s);
  settle();
  ASSERT_EQ(at_decode_.closed.size(), 1U);
  EXPECT_EQ(at_decode_.closed[0].code, ErrorCode::deadline_exceeded);
  EXPECT_EQ(at_decode_.opened, 0);
}

TEST(SocketAddressTest, KnowsLoopback) {
  for (const std::string_view host : {"127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(SocketAddress::parse(host, 1)->is_loopback()) << host;
  for (const std::string_view host : {"10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "126.0.0.1"})
    EXPECT_FALSE(SocketAddress::parse(host, 1)->is_loopback()) << host;
  EXPECT_EQ(SocketAddress::parse("::1", 1)->host(), "::1");
  EXPECT_EQ(SocketAddress::parse("127.0.0.1", 1)->host(), "127.0.0.1");
}

}  // namespace
}  // namespace kvshard
