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
    00000000                 # table
    04000000 02000000 08000000                           # parts, part, interleave
    04000000 0c000000 05000000 09000000                  # first and total heads, layers
    0300 696478              # name "idx"
    03000000 01000000 07     # layers, buffers_per_layer, element_type u8
    01000000 07000000 02     # heads, head_bytes, order head_major
    10000000                 # page_size
    0000000000000000 0000000000000000 0000000000000000   # packed
    01010000                 # page_count
    01000000                 # table
    01000000 00000000 00000000
    00000000 00000000 00000000 00000000
  01000000 03000000          # rank, ranks
)";

std::string golden(std::string_view name) {
  if (name == "hello")
    return R"(
      f4000000 01 000000       # payload length 244, type
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
      00010000 02 000000
      4b565331 0100            # magic, version
      1122334455667788         # incarnation
      0a00000000000000         # epoch
      02000000 04000000        # shard_rank, shard_size
    )" + std::string{kGeometryHex} +
           R"(
      04000000 61646472        # transport_address "addr"
      02000000 726b            # staging "rk"
      01000000 70              # pool "p"
      03000000                 # slot_count
      0001000100000000         # slot_stride
      e8030000                 # heartbeat_ms
    )";
  if (name == "pull")
    return R"(
      4c000000 03 000000
      0807060504030201         # pull
      1817161514131211         # room
      03000000 dc050000        # window, wait_ms
      02000000                 # 2 tables
        00000000 01000000 0200000000000000 0000010000000000   # number, phase, first, end token
        01000000 00000000 0000000000000000 0100000000000000
    )";
  if (name == "ready")
    return R"(
      5b000000 04 000000
      0807060504030201         # pull
      0900000000000000         # lease
      0500000000000000         # piece
      01000000                 # slot
      2100000000000000         # generation
      0040000000000000         # payload_bytes
      02000000 04000000        # first_buffer, buffer_count
      03000000                 # base
      0504030201000000 11000000                               # first_unit, unit_count
      00 00 01                 # partial, last, checksum
      02000000 07000000 02010000                              # 2 pages
      00000000                 # no tables
      00000000                 # no side_data
    )";
  if (name == "ready_last")
    return R"(
      68000000 04 000000
      0807060504030201
      0900000000000000
      0600000000000000
      00000000
      0000000000000000
      0000000000000000
      00000000 00000000
      00000000
      0000000000000000 00000000
      00 01 00                 # partial, last, checksum
      00000000                 # no pages
      01000000                 # 1 table
        00000000 03000000 0000010000000000   # number, base, end token
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
  if (name == "assign")
    return "19000000 0e 000000  01000000 01000000 02000000 03000000 04000000 05000000 01";
  if (name == "bye") return "05000000 0a 000000  08 0200 6e6f";
  if (name == "authenticate")
    return R"(
      28000000 0b 000000
      4b565331 0100 0200       # magic, version_min, version_max
      404142434445464748494a4b4c4d4e4f 505152535455565758595a5b5c5d5e5f
    )";
  if (name == "challenge")
    return R"(
      26000000 0c 000000
      4b565331 0100            # magic, version
      808182838485868788898a8b8c8d8e8f 909192939495969798999a9b9c9d9e9f
    )";
  if (name == "proof")
    return R"(
      20000000 0d 000000
      c0c1c2c3c4c5c6c7c8c9cacbcccdcecf d0d1d2d3d4d5d6d7d8d9dadbdcdddedf
    )";
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

TEST(CodecTest, RefusesTokensThatEndBeforeTheyBegin) {
  Pull pull = sample_pull();
  pull.tables[0].end_token = pull.tables[0].first_token;
  EXPECT_TRUE(decode<Pull>(payload_of(frame_of(pull))));  // nothing to move is a pull too
  pull.tables[0].end_token = pull.tables[0].first_token - 1;
  EXPECT_TRUE(refused(pull, "table.end_token: 1"));
}

// acceptance 44
TEST(CodecTest, RefusesAWindowOfNothingAndTokensBeyondCounting) {
  Pull pull = sample_pull();
  pull.window = 0;
  EXPECT_TRUE(refused(pull, "window: 0"));
  pull = sample_pull();
  pull.tables[1].end_token = (std::uint64_t{1} << 62) + 1;
  EXPECT_TRUE(refused(pull, "table.end_token"));
  Ready ready = sample_last_ready();
  ready.tables[0].end_token = ~std::uint64_t{0};
  EXPECT_TRUE(refused(ready, "table.end_token"));
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
  ready.unit_count = 1;
  EXPECT_TRUE(refused(ready, "unit_count"));
  ready = sample_last_ready();
  ready.pages = {LocalPage{1}};
  EXPECT_TRUE(refused(ready, "pages"));
  ready = sample_ready();
  ready.tables = {{}};
  EXPECT_TRUE(refused(ready, "tables"));
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
  const std::string up_to_tables = std::string(2 * 75, '0');
  EXPECT_EQ(decode<Ready>(hex(up_to_tables + "11000000")).error().message,
            "ready: tables: length 17, at most 16 allowed");
  EXPECT_EQ(decode<Ready>(hex(up_to_tables + "10000000")).error().message,
            "ready: tables: length 16 does not fit into the 0 bytes left");
  EXPECT_EQ(decode<Ready>(hex(up_to_tables + "ffffffff")).error().code,
            ErrorCode::invalid_argument);
  EXPECT_EQ(decode<Ready>(hex(up_to_tables + "00000000 01000100")).error().message,
            "ready: side_data: length 65537, at most 65536 allowed");
  EXPECT_EQ(decode<Bye>(hex("01 0104")).error().message,
            "bye: error.message: length 1025, at most 1024 allowed");
}

TEST(CodecTest, ReadsTextsAndBlobsAtTheirLimits) {
  Ready ready = sample_last_ready();
  ready.side_data.resize(kMaxSideDataBytes);
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(ready))));
  ready.tables.resize(kMaxBufferGroups);
  EXPECT_TRUE(decode<Ready>(payload_of(frame_of(ready))));
  EXPECT_TRUE(decode<Assign>(payload_of(frame_of(Assign{.lanes = std::vector<Lane>(kMaxLanes)}))));
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
  EXPECT_EQ(decode_header(header(8, 15)).error().message,
            "frame header: message type 15 is not known");
  EXPECT_EQ(decode_header(header(8, 9, 4)).error().message,
            "frame header: reserved bytes 00 04 00 are not zero");
  EXPECT_FALSE(decode_header(header(93, 1), 100));
  EXPECT_TRUE(decode_header(header(92, 1), 100));
}

TEST(CodecTest, NamesEveryType) {
  EXPECT_EQ(to_string(MessageType::verdict), "verdict");
  EXPECT_EQ(to_string(static_cast<MessageType>(15)), "unknown");
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
