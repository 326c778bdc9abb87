#include "wire/codec.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cctype>
#include <limits>
#include <string>
#include <string_view>

#include "wire/samples.hpp"

namespace kvshard::wire {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

// Hex digits to bytes; everything from a '#' to the end of its line is a comment.
std::vector<std::byte> hex(std::string_view text) {
  std::vector<std::byte> bytes;
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '#') i = text.find('\n', i);
    if (std::isxdigit(static_cast<unsigned char>(text[i])) == 0) continue;
    digits += text[i];
    if (digits.size() < 2) continue;
    bytes.push_back(static_cast<std::byte>(std::stoi(digits, nullptr, 16)));
    digits.clear();
  }
  return bytes;
}

// The bytes of every message, written by hand from docs/wire_format.md. They never change within a version.
constexpr std::string_view kGeometryHex = R"(
  0400 74696e79              # model_id "tiny"
  02000000                   # 2 groups
    0200 6b76                # name "kv"
    03000000 02000000 03     # layers, buffers_per_layer, element_type bf16
    04000000 20000000 01     # heads, head_bytes, order token_major
    10000000                 # page_size
    8000000000000000 2000000000000000 0009000000000000   # token, head, page stride
    01010000                 # page_count
    0300 696478              # name "idx"
    03000000 01000000 07     # layers, buffers_per_layer, element_type u8
    01000000 07000000 02     # heads, head_bytes, order head_major
    10000000                 # page_size
    0000000000000000 0000000000000000 0000000000000000   # packed
    01010000                 # page_count
)";

std::string golden(std::string_view name) {
  if (name == "hello")
    return R"(
      ac000000 01 000000       # payload length 172, type
      4b565331 0100 0200       # magic "KVS1", version_min, version_max
      8877665544332211         # incarnation
      0200 6730                # group "g0"
      0a00000000000000         # epoch
      02000000 04000000        # shard_rank, shard_size
      0300 756378              # transport "ucx"
    )" + std::string{kGeometryHex} +
           R"(
      0000000100000000         # landing_payload_bytes
      e8030000                 # heartbeat_ms
    )";
  if (name == "welcome")
    return R"(
      b3000000 02 000000
      4b565331 0100            # magic, version
      1122334455667788         # incarnation
      0a00000000000000         # epoch
      02000000 04000000        # shard_rank, shard_size
    )" + std::string{kGeometryHex} +
           R"(
      04000000 61646472        # transport_address "addr"
      02000000 726b            # staging "rk"
      03000000                 # slot_count
      0001000100000000         # slot_stride
      e8030000                 # heartbeat_ms
    )";
  if (name == "pull")
    return R"(
      20000000 03 000000
      0807060504030201         # pull
      1817161514131211         # room
      02000000 00000100        # first_position, end_position
      03000000 dc050000        # window, wait_ms
    )";
  if (name == "ready")
    return R"(
      56000000 04 000000
      0807060504030201         # pull
      0900000000000000         # lease
      0500000000000000         # piece
      01000000                 # slot
      2100000000000000         # generation
      0040000000000000         # payload_bytes
      02000000 04000000        # first_buffer, buffer_count
      00 01                    # last, checksum
      02000000                 # 2 runs
        02000000 04000000 03000000
        14000000 01000000 01000000
      00000000                 # no side_data
    )";
  if (name == "ready_last")
    return R"(
      43000000 04 000000
      0807060504030201
      0900000000000000
      0600000000000000
      00000000
      0000000000000000
      0000000000000000
      00000000 00000000
      01 00                    # last, checksum
      00000000                 # no runs
      05000000 746f6b656e      # side_data "token"
    )";
  if (name == "release")
    return "1c000000 05 000000  0700000000000000 0500000000000000 01000000 2100000000000000";
  if (name == "commit")
    return "18000000 06 000000  0700000000000000 0600000000000000 1032547698badcfe";
  if (name == "verdict_valid") return "0b000000 07 000000  0700000000000000 01 0000";
  if (name == "verdict_stale")
    return "1a000000 07 000000  0700000000000000 00 0f00 6c65617365203920 65787069726564";
  if (name == "abort") return "11000000 08 000000  0700000000000000 06 0600 656e67696e65";
  if (name == "ping") return "08000000 09 000000  0201000000000000";
  if (name == "bye") return "05000000 0a 000000  08 0200 6e6f";
  return {};
}

TEST(CodecTest, EncodesEveryMessageToItsGoldenBytes) {
  for_each_sample([](const char* name, const auto& message) {
    EXPECT_EQ(frame_of(message), hex(golden(name))) << name;
    EXPECT_EQ(*frame_bytes(message), hex(golden(name)).size()) << name;
  });
}

TEST(CodecTest, DecodesEveryMessageFromItsGoldenBytes) {
  for_each_sample([]<class M>(const char* name, const M&) {
    const auto frame = hex(golden(name));
    const auto header = decode_header(std::span{frame}.first<kFrameHeaderBytes>());
    ASSERT_TRUE(header) << header.error().message;
    EXPECT_EQ(header->type, type_of<M>) << name;
    EXPECT_EQ(header->payload_bytes, frame.size() - kFrameHeaderBytes) << name;
    const auto decoded = decode<M>(payload_of(frame));
    ASSERT_TRUE(decoded) << decoded.error().message;
    EXPECT_EQ(frame_of(*decoded), frame) << name;  // every field came back
  });
}

TEST(CodecTest, AppendsFramesBehindOneAnother) {
  std::vector<std::byte> out;
  encode(Ping{.sequence = 1}, out);
  encode(Ping{.sequence = 2}, out);
  EXPECT_EQ(out, hex("08000000 09 000000 0100000000000000  08000000 09 000000 0200000000000000"));
}

template <class M>
AssertionResult refused(const M& message, std::string_view field) {
  const auto decoded = decode<M>(payload_of(frame_of(message)));
  if (decoded) return AssertionFailure() << "was accepted";
  if (decoded.error().code != ErrorCode::invalid_argument)
    return AssertionFailure() << "has code " << kvshard::to_string(decoded.error().code);
  const std::string start = std::string{to_string(type_of<M>)} + ": " + std::string{field};
  if (!decoded.error().message.starts_with(start))
    return AssertionFailure() << "says \"" << decoded.error().message << "\", not \"" << start
                              << "...\"";
  return AssertionSuccess();
}

TEST(CodecTest, RefusesAShardRankOutsideItsGroup) {
  Hello hello = sample_hello();
  hello.shard_rank = 4;
  EXPECT_TRUE(refused(hello, "shard_rank: 4"));
  hello.shard_size = 0;
  EXPECT_TRUE(refused(hello, "shard_size: 0"));
  Welcome welcome = sample_welcome();
  welcome.shard_rank = 7;
  EXPECT_TRUE(refused(welcome, "shard_rank: 7"));
}

TEST(CodecTest, RefusesAGeometryThatIsNotPossible) {
  Hello hello = sample_hello();
  hello.geometry.groups[1].heads = 0;
  EXPECT_TRUE(refused(hello, "geometry: geometry: group idx: heads is 0"));
  hello.geometry.groups.clear();
  EXPECT_TRUE(refused(hello, "geometry"));
}

TEST(CodecTest, RefusesPositionsThatEndBeforeTheyBegin) {
  Pull pull = sample_pull();
  pull.end_position = pull.first_position;
  EXPECT_TRUE(decode<Pull>(payload_of(frame_of(pull))));  // nothing to move is a pull too
  pull.end_position = pull.first_position - 1;
  EXPECT_TRUE(refused(pull, "first_position: 2"));
}

// acceptance 44
TEST(CodecTest, RefusesRunsThatWrapOrStandStill) {
  const auto with_run = [](kvshard::Run run) {
    Ready ready = sample_ready();
    ready.positions = {run};
    return ready;
  };
  constexpr std::uint32_t kMax = std::numeric_limits<std::uint32_t>::max();
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(with_run({kMax, 1, 1})))));
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(with_run({kMax - 8, 4, 3})))));
  EXPECT_TRUE(refused(with_run({kMax - 8, 4, 4}), "positions.last"));
  EXPECT_TRUE(refused(with_run({kMax, kMax, kMax}), "positions.last"));
  EXPECT_TRUE(refused(with_run({5, 1, 0}), "positions.count"));
  EXPECT_TRUE(refused(with_run({5, 0, 1}), "positions.stride"));
}

TEST(CodecTest, RefusesBuffersBeyondTheLimit) {
  Ready ready = sample_ready();
  ready.first_buffer = kMaxBuffers - 4;
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(ready))));
  ready.first_buffer = kMaxBuffers - 3;
  EXPECT_TRUE(refused(ready, "buffer_count"));
  ready.first_buffer = kMaxBuffers + 1;
  EXPECT_TRUE(refused(ready, "first_buffer"));
}

TEST(CodecTest, RefusesBytesInTheLastReadyAndSideDataInAnyOther) {
  Ready ready = sample_last_ready();
  ready.payload_bytes = 1;
  EXPECT_TRUE(refused(ready, "payload_bytes"));
  ready = sample_last_ready();
  ready.positions = {{0, 1, 1}};
  EXPECT_TRUE(refused(ready, "positions"));
  ready = sample_ready();
  ready.side_data = to_bytes("x");
  EXPECT_TRUE(refused(ready, "side_data"));
}

TEST(CodecTest, RefusesFlagsAndEnumsWithoutAMeaning) {
  const auto pull_7 = std::string{"0700000000000000"};
  EXPECT_EQ(decode<Verdict>(hex(pull_7 + "02 0000")).error().message,
            "verdict: valid: 2 is neither 0 nor 1");
  EXPECT_EQ(decode<Abort>(hex(pull_7 + "00 0000")).error().message,
            "abort: error.code: 0 is not a known value");
  EXPECT_EQ(decode<Abort>(hex(pull_7 + "0a 0000")).error().message,
            "abort: error.code: 10 is not a known value");
  EXPECT_TRUE(decode<Abort>(hex(pull_7 + "09 0000")));
}

TEST(CodecTest, RefusesLengthsBeyondTheirLimitsBeforeItReadsOn) {
  const std::string up_to_runs = std::string(2 * 54, '0');
  EXPECT_EQ(decode<Ready>(hex(up_to_runs + "01400000")).error().message,
            "ready: positions: length 16385, at most 16384 allowed");
  EXPECT_EQ(decode<Ready>(hex(up_to_runs + "00400000")).error().message,
            "ready: positions: length 16384 does not fit into the 0 bytes left");
  EXPECT_EQ(decode<Ready>(hex(up_to_runs + "ffffffff")).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(decode<Ready>(hex(up_to_runs + "00000000 01000100")).error().message,
            "ready: side_data: length 65537, at most 65536 allowed");
  EXPECT_EQ(decode<Bye>(hex("01 0104")).error().message,
            "bye: error.message: length 1025, at most 1024 allowed");
}

TEST(CodecTest, ReadsTextsAndBlobsAtTheirLimits) {
  Ready ready = sample_last_ready();
  ready.side_data.resize(kMaxSideDataBytes);
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(ready))));
  ready = sample_ready();
  ready.positions.assign(kMaxRuns, kvshard::Run{1, 1, 1});
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(ready))));
  Welcome welcome = sample_welcome();
  welcome.transport_address.resize(kMaxBlobBytes);
  welcome.staging.resize(kMaxBlobBytes);
  EXPECT_TRUE(decode<Welcome>(payload_of(frame_of(welcome))));
  Hello hello = sample_hello();
  hello.group.assign(kMaxNameBytes, 'g');
  EXPECT_TRUE(decode<Hello>(payload_of(frame_of(hello))));
}

TEST(CodecTest, DoesNotEncodeWhatAPeerWouldRefuse) {
  Ready ready = sample_last_ready();
  ready.side_data.resize(kMaxSideDataBytes + 1);
  const auto bytes = frame_bytes(ready);
  ASSERT_FALSE(bytes);
  EXPECT_EQ(bytes.error().message, "ready: side_data has length 65537, at most 65536 can be sent");
  EXPECT_TRUE(frame_of(ready).empty());
  Hello hello = sample_hello();
  hello.geometry.groups.resize(kMaxBufferGroups + 1);
  EXPECT_FALSE(frame_bytes(hello));
}

TEST(CodecTest, CutsTheTextOfErrors) {
  const Bye bye{.error = {ErrorCode::internal, std::string(5000, 'x')}};
  const auto decoded = decode<Bye>(payload_of(frame_of(bye)));
  ASSERT_TRUE(decoded) << decoded.error().message;
  EXPECT_EQ(decoded->error.message, std::string(kMaxMessageTextBytes, 'x'));
}

std::array<std::byte, kFrameHeaderBytes> header(std::uint32_t length, std::uint8_t type,
                                                std::uint8_t reserved = 0) {
  return {static_cast<std::byte>(length),       static_cast<std::byte>(length >> 8),
          static_cast<std::byte>(length >> 16), static_cast<std::byte>(length >> 24),
          static_cast<std::byte>(type),         std::byte{0},
          static_cast<std::byte>(reserved),     std::byte{0}};
}

TEST(CodecTest, ChecksTheFrameHeader) {
  EXPECT_EQ(decode_header(header(kMaxFrameBytes - kFrameHeaderBytes, 10))->payload_bytes,
            kMaxFrameBytes - kFrameHeaderBytes);
  EXPECT_EQ(decode_header(header(kMaxFrameBytes - kFrameHeaderBytes + 1, 10)).error().message,
            "frame header: a frame of 1048577 bytes, at most 1048576 allowed");
  EXPECT_FALSE(decode_header(header(0xffffffff, 1)));
  EXPECT_EQ(decode_header(header(8, 0)).error().message,
            "frame header: message type 0 is not known");
  EXPECT_EQ(decode_header(header(8, 11)).error().message,
            "frame header: message type 11 is not known");
  EXPECT_EQ(decode_header(header(8, 9, 4)).error().message,
            "frame header: reserved bytes 00 04 00 are not zero");
  EXPECT_FALSE(decode_header(header(93, 1), 100));
  EXPECT_TRUE(decode_header(header(92, 1), 100));
}

TEST(CodecTest, NamesEveryType) {
  EXPECT_EQ(to_string(MessageType::verdict), "verdict");
  EXPECT_EQ(to_string(static_cast<MessageType>(11)), "unknown");
}

// acceptance 43
TEST(CodecTest, RefusesAnotherVersionNamingBoth) {
  // A later version may change all that follows the prefix.
  const auto future = hex("4b565331 0200 0300 ffffffffffffffff");
  const auto prefix = decode_hello_prefix(future);
  ASSERT_TRUE(prefix) << prefix.error().message;
  EXPECT_EQ(prefix->version_min, 2);
  EXPECT_EQ(prefix->version_max, 3);
  const auto version = choose_version(*prefix);
  ASSERT_FALSE(version);
  EXPECT_EQ(version.error().code, ErrorCode::unsupported);
  EXPECT_EQ(version.error().message, "the peer speaks protocol versions 2 to 3, this side 1 to 1");
  EXPECT_EQ(decode<Hello>(future).error().message, version.error().message);

  const auto welcome = decode<Welcome>(hex("4b565331 0200 ffff"));
  ASSERT_FALSE(welcome);
  EXPECT_EQ(welcome.error().code, ErrorCode::unsupported);
  EXPECT_EQ(welcome.error().message, "the peer speaks protocol versions 2 to 2, this side 1 to 1");
}

TEST(CodecTest, ChoosesTheHighestCommonVersion) {
  EXPECT_EQ(*choose_version({1, 1}), 1);
  EXPECT_EQ(*choose_version({1, 9}), 1);
}

TEST(CodecTest, RefusesWhatIsNoKvshardPeer) {
  EXPECT_EQ(decode_hello_prefix(hex("47455420 2f20 4854")).error().message,
            "hello: magic: 0x20544547 instead of 0x3153564b");
  EXPECT_EQ(decode<Hello>(hex("47455420 2f20 4854")).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(decode_hello_prefix(hex("4b5653")).error().message,
            "hello: magic: 4 bytes needed, 3 left");
  EXPECT_EQ(decode_hello_prefix(hex("4b565331 0000 0100")).error().message,
            "hello: version_min: 0 is not within 1 to 1");
  EXPECT_EQ(decode_hello_prefix(hex("4b565331 0300 0200")).error().message,
            "hello: version_min: 3 is not within 1 to 2");
}

TEST(PieceDigestTest, DependsOnEveryNumberAndOnTheOrder) {
  const auto digest = [](auto... pieces) {
    PieceDigest result;
    (result.add(pieces[0], static_cast<std::uint32_t>(pieces[1]), pieces[2], pieces[3]), ...);
    return result.value();
  };
  using Numbers = std::array<std::uint64_t, 4>;
  const Numbers a{0, 1, 2, 3};
  const Numbers b{1, 1, 2, 3};
  EXPECT_EQ(digest(), 0x6b76736861726431U);
  EXPECT_EQ(digest(a), 0xc5a81c9ed6f06039U);  // as docs/wire_format.md defines it
  EXPECT_NE(digest(a, b), digest(b, a));
  for (std::size_t i = 0; i < a.size(); ++i) {
    Numbers changed = a;
    changed[i] += 1;
    EXPECT_NE(digest(a), digest(changed)) << "number " << i;
  }
}

}  // namespace
}  // namespace kvshard::wire
