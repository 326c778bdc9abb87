#include "control/handshake.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wire/samples.hpp"

namespace kvshard {
namespace {

using wire::MessageType;
using Bytes = std::vector<std::byte>;
using Side = Handshake::Side;

std::shared_ptr<Secrets> secrets(std::initializer_list<std::string_view> texts) {
  auto made = std::make_shared<Secrets>();
  for (const auto text : texts)
    made->push_back(std::move(HmacKey::create(std::as_bytes(std::span{text}))).value());
  return made;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[std::to_integer<std::size_t>(byte >> 4)];
    text += kDigits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return text;
}

Result<bool> take(Handshake& side, const Bytes& frame, Bytes& out) {
  out.clear();
  const auto header = wire::decode_header(std::span{frame}.first<wire::kFrameHeaderBytes>());
  if (!header) return header.error();
  return side.take(header->type, frame, out);
}

// A handshake whose frames pass through the test's hands.
struct Pair {
  Handshake decode, prefill;
  Bytes authenticate, challenge, decode_proof, prefill_proof;

  Pair(std::shared_ptr<Secrets> d, std::shared_ptr<Secrets> p)
      : decode{Side::decode, std::move(d)}, prefill{Side::prefill, std::move(p)} {}

  // Ends where either side refuses.
  Result<bool> run(const std::function<void(Pair&, int step)>& spoil = [](Pair&, int) {}) {
    if (auto started = decode.start(authenticate); !started) return started.error();
    spoil(*this, 0);
    if (auto done = take(prefill, authenticate, challenge); !done || *done) return done;
    spoil(*this, 1);
    if (auto done = take(decode, challenge, decode_proof); !done || *done) return done;
    spoil(*this, 2);
    if (auto done = take(prefill, decode_proof, prefill_proof); !done || !*done) return done;
    spoil(*this, 3);
    Bytes nothing;
    auto done = take(decode, prefill_proof, nothing);
    EXPECT_TRUE(nothing.empty());
    return done;
  }
};

constexpr std::string_view kOne = "the first shared secret";
constexpr std::string_view kTwo = "the second shared secret";
constexpr std::string_view kThree = "somebody else's secret";

TEST(HmacKeyTest, ComputesTheValuesOfRfc4231AgainAndAgain) {
  auto key = HmacKey::create(Bytes(20, std::byte{0x0b}));
  ASSERT_TRUE(key);
  for (int i = 0; i < 2; ++i) {
    const auto mac = key->compute({wire::to_bytes("Hi "), wire::to_bytes("There")});
    ASSERT_TRUE(mac);
    EXPECT_EQ(hex(*mac), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  }
  auto jefe = HmacKey::create(wire::to_bytes("Jefe"));
  ASSERT_TRUE(jefe);
  EXPECT_EQ(hex(*jefe->compute({wire::to_bytes("what do ya want for nothing?")})),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(HandshakeTest, SidesWithOneSecretProveThemselves) {
  Pair pair{secrets({kOne}), secrets({kOne})};
  const auto done = pair.run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_TRUE(*done);
  FrameMac sending = pair.decode.take_sending(), receiving = pair.prefill.take_receiving();
  FrameMac back = pair.prefill.take_sending(), at_decode = pair.decode.take_receiving();
  for (std::uint64_t i = 0; i < 3; ++i) {
    Bytes out = wire::to_bytes("earlier");
    wire::encode(wire::Ping{i}, out);
    ASSERT_TRUE(sending.seal(out, 7));
    const auto payload = receiving.open(std::span{out}.subspan(7));
    ASSERT_TRUE(payload) << payload.error().message;
    EXPECT_EQ(wire::decode<wire::Ping>(*payload)->sequence, i);
    Bytes answer;
    wire::encode(wire::Ping{i}, answer);
    ASSERT_TRUE(back.seal(answer, 0));
    EXPECT_NE(answer, Bytes(out.begin() + 7, out.end()));  // the directions have keys of their own
    EXPECT_TRUE(at_decode.open(answer));
  }
}

// acceptance 43
TEST(HandshakeTest, AWrongSecretIsRefusedBeforePrefillHasProvedOrSaidAnything) {
  Pair pair{secrets({kThree}), secrets({kOne, kTwo})};
  const auto done = pair.run();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::failed_precondition);
  EXPECT_EQ(done.error().message, "the decode rank's secret is not the prefill rank's");
  EXPECT_TRUE(pair.prefill_proof.empty());
  EXPECT_EQ(pair.challenge.size(), wire::kFrameHeaderBytes + 4 + 2 + 32);  // a nonce, no more
}

// acceptance 43
TEST(HandshakeTest, APrefillRankThatCannotProveItselfIsRefused) {
  Pair pair{secrets({kOne}), secrets({kOne})};
  const auto done = pair.run([](Pair& p, int step) {
    if (step == 3) p.prefill_proof.back() ^= std::byte{1};
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message, "the prefill rank's secret is not the decode rank's");
}

// Every step of a rotation, in whatever order the ranks' files are changed.
TEST(HandshakeTest, SecretsRotateWithoutAGap) {
  const auto work = [](std::shared_ptr<Secrets> decode, std::shared_ptr<Secrets> prefill) {
    return Pair{std::move(decode), std::move(prefill)}.run().ok();
  };
  EXPECT_TRUE(work(secrets({kOne}), secrets({kOne, kTwo})));
  EXPECT_TRUE(work(secrets({kOne, kTwo}), secrets({kOne})));
  EXPECT_TRUE(work(secrets({kTwo, kOne}), secrets({kOne, kTwo})));
  EXPECT_TRUE(work(secrets({kOne, kTwo}), secrets({kTwo, kOne})));
  EXPECT_TRUE(work(secrets({kTwo}), secrets({kTwo, kOne})));
  EXPECT_FALSE(work(secrets({kTwo}), secrets({kOne})));  // a step was left out
  EXPECT_FALSE(work(secrets({kTwo, kOne}), secrets({kOne})));
}

// acceptance 42
TEST(HandshakeTest, AnyBitChangedOnTheWayIsNoticed) {
  for (int step = 0; step < 4; ++step) {
    for (std::size_t bit = 8 * wire::kFrameHeaderBytes;; ++bit) {
      Pair pair{secrets({kOne}), secrets({kOne})};
      bool changed = false;
      const auto done = pair.run([&](Pair& p, int at) {
        Bytes* const frames[] = {&p.authenticate, &p.challenge, &p.decode_proof, &p.prefill_proof};
        if (at != step || bit / 8 >= frames[at]->size()) return;
        (*frames[at])[bit / 8] ^= std::byte{1} << (bit % 8);
        changed = true;
      });
      if (!changed) break;
      ASSERT_FALSE(done) << "bit " << bit << " of message " << step;
    }
  }
}

// acceptance 42
TEST(HandshakeTest, ARecordedHandshakeIsWorthNothing) {
  Pair recorded{secrets({kOne}), secrets({kOne})};
  ASSERT_TRUE(recorded.run());
  Pair replay{secrets({kOne}), secrets({kOne})};
  Bytes out;
  ASSERT_TRUE(take(replay.prefill, recorded.authenticate, out));
  EXPECT_NE(out, recorded.challenge);
  const auto done = take(replay.prefill, recorded.decode_proof, out);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message, "the decode rank's secret is not the prefill rank's");
}

// A prefill rank without the secret sends back what it hears.
TEST(HandshakeTest, AProofReflectedProvesNothing) {
  Pair pair{secrets({kOne}), secrets({kOne})};
  const auto done = pair.run([](Pair& p, int step) {
    if (step == 3) p.prefill_proof = p.decode_proof;
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message, "the prefill rank's secret is not the decode rank's");
}

// acceptance 43
TEST(HandshakeTest, OldAndFutureVersionsAreRefusedNamingBoth) {
  for (const std::uint16_t version : {std::uint16_t{2}, std::uint16_t{65535}}) {
    Handshake prefill{Side::prefill, secrets({kOne})};
    Bytes frame, out;
    wire::encode(wire::Authenticate{.version_min = version, .version_max = version}, frame);
    const auto done = take(prefill, frame, out);
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().code, ErrorCode::unsupported);
    EXPECT_EQ(done.error().message, "the peer speaks protocol versions " + std::to_string(version) +
                                        " to " + std::to_string(version) + ", this side 1 to 1");
    EXPECT_TRUE(out.empty());
  }
}

// acceptance 42
TEST(HandshakeTest, MessagesOutOfTurnAreRefused) {
  wire::for_each_sample([](const char* name, const auto& message) {
    Bytes frame, out;
    wire::encode(message, frame);
    Handshake prefill{Side::prefill, secrets({kOne})};
    Handshake decode{Side::decode, secrets({kOne})};
    ASSERT_TRUE(decode.start(out));
    EXPECT_EQ(take(prefill, frame, out).ok(), std::string_view{name} == "authenticate") << name;
    EXPECT_EQ(take(decode, frame, out).ok(), std::string_view{name} == "challenge") << name;
  });
}

TEST(HandshakeTest, PeersSayWhy) {
  Handshake prefill{Side::prefill, secrets({kOne})};
  Bytes frame, out;
  wire::encode(wire::sample_hello(), frame);
  EXPECT_EQ(take(prefill, frame, out).error().message,
            "the decode rank uses no secret, and this prefill rank requires one");
  Handshake decode{Side::decode, secrets({kOne})};
  ASSERT_TRUE(decode.start(out));
  frame.clear();
  wire::encode(wire::Bye{{ErrorCode::failed_precondition, "no"}}, frame);
  EXPECT_EQ(take(decode, frame, out).error().message, "no");
}

class FrameMacTest : public testing::Test {
 protected:
  FrameMacTest() {
    Bytes key;
    for (int i = 0; i < 32; ++i) key.push_back(static_cast<std::byte>(i));
    sending_.emplace(std::move(HmacKey::create(key)).value());
    receiving_.emplace(std::move(HmacKey::create(key)).value());
  }
  Bytes sealed(std::uint64_t sequence) {
    Bytes frame;
    wire::encode(wire::Ping{sequence}, frame);
    EXPECT_TRUE(sending_->seal(frame, 0));
    return frame;
  }
  std::optional<FrameMac> sending_, receiving_;
};

// Computed by other means: HMAC-SHA256 under 00 01 .. 1f over u64 frame number, header, payload.
TEST_F(FrameMacTest, SealsToItsGoldenBytes) {
  EXPECT_EQ(hex(sealed(0x0102)),
            "18000000090000000201000000000000d9420d1b0e70e5a70e16af3287dfc189");
  EXPECT_EQ(hex(sealed(0x0102)),
            "18000000090000000201000000000000b562dd33b91a3c5595e69a666650cbba");
}

// acceptance 42
TEST_F(FrameMacTest, FindsEveryChangedBitAndEveryTruncation) {
  const Bytes frame = sealed(7);
  const auto fresh = [&] {
    Bytes key;
    for (int i = 0; i < 32; ++i) key.push_back(static_cast<std::byte>(i));
    return FrameMac{std::move(HmacKey::create(key)).value()};
  };
  for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
    Bytes changed = frame;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(fresh().open(changed)) << "bit " << bit;
  }
  for (std::size_t size = wire::kFrameHeaderBytes; size < frame.size(); ++size)
    EXPECT_FALSE(fresh().open(std::span{frame}.first(size))) << size;
  EXPECT_TRUE(fresh().open(frame));
}

// acceptance 42
TEST_F(FrameMacTest, FindsFramesThatAreLostDoubledOrSwapped) {
  const Bytes first = sealed(1), second = sealed(2), third = sealed(3);
  ASSERT_TRUE(receiving_->open(first));
  EXPECT_FALSE(receiving_->open(first));  // again; a connection ends here
  EXPECT_TRUE(receiving_->open(third));   // numbered as it was sent, after the one that was refused
  const auto late = receiving_->open(second);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::failed_precondition);
  EXPECT_EQ(late.error().message,
            "the MAC of frame 3 is wrong: it was changed, sent twice, or is out of order");
}

}  // namespace
}  // namespace kvshard
