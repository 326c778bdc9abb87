#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvshard/result.hpp"
#include "wire/messages.hpp"

// Messages to bytes and back; docs/wire_format.md gives the bytes. Pure functions: no I/O, no
// state.
namespace kvshard::wire {

template <class M>
concept Message = std::same_as<M, Hello> || std::same_as<M, Welcome> || std::same_as<M, Pull> ||
    std::same_as<M, Ready> || std::same_as<M, Release> || std::same_as<M, Commit> ||
    std::same_as<M, Verdict> || std::same_as<M, Abort> || std::same_as<M, Ping> ||
    std::same_as<M, Bye> || std::same_as<M, Authenticate> || std::same_as<M, Challenge> ||
    std::same_as<M, Proof> || std::same_as<M, Assign>;

template <Message M>
inline constexpr MessageType type_of{};
template <>
inline constexpr MessageType type_of<Hello> = MessageType::hello;
template <>
inline constexpr MessageType type_of<Welcome> = MessageType::welcome;
template <>
inline constexpr MessageType type_of<Pull> = MessageType::pull;
template <>
inline constexpr MessageType type_of<Ready> = MessageType::ready;
template <>
inline constexpr MessageType type_of<Release> = MessageType::release;
template <>
inline constexpr MessageType type_of<Commit> = MessageType::commit;
template <>
inline constexpr MessageType type_of<Verdict> = MessageType::verdict;
template <>
inline constexpr MessageType type_of<Abort> = MessageType::abort;
template <>
inline constexpr MessageType type_of<Ping> = MessageType::ping;
template <>
inline constexpr MessageType type_of<Bye> = MessageType::bye;
template <>
inline constexpr MessageType type_of<Authenticate> = MessageType::authenticate;
template <>
inline constexpr MessageType type_of<Challenge> = MessageType::challenge;
template <>
inline constexpr MessageType type_of<Proof> = MessageType::proof;
template <>
inline constexpr MessageType type_of<Assign> = MessageType::assign;

/// The message's name as in MessageType, for logs; "unknown" for any other value.
[[nodiscard]] std::string_view to_string(MessageType type) noexcept;

/// A frame is a header (u32 payload length, u8 type, 3 zero bytes) and the payload, little-endian.
inline constexpr std::size_t kFrameHeaderBytes = 8;

struct FrameHeader {
  MessageType type{};
  std::uint32_t payload_bytes{0};
};

/// Errors: invalid_argument naming the field, when the frame (header included) would be longer than
/// `max_frame_bytes`, the type is not known, or a reserved byte is not zero.
Result<FrameHeader> decode_header(std::span<const std::byte, kFrameHeaderBytes> header,
                                  std::size_t max_frame_bytes = kMaxFrameBytes);

/// Bytes of the message's frame, header included.
/// Errors: invalid_argument naming a field that is longer than a peer would accept.
template <Message M>
Result<std::size_t> frame_bytes(const M& message);

/// Appends the message's frame to `out`. Requires frame_bytes() to be ok. The text of an Error and
/// of a Verdict is cut to kMaxMessageTextBytes.
template <Message M>
void encode(const M& message, std::vector<std::byte>& out);

/// Reads a payload. Allocates no more than the payload's own size, whatever the counts in it say.
/// Errors: invalid_argument naming message, field and value: truncated, trailing bytes, out of
/// range or beyond a limit, a geometry that validate() refuses. HELLO, WELCOME, AUTHENTICATE and
/// CHALLENGE of a protocol that is not spoken here: unsupported, naming both versions.
template <Message M>
Result<M> decode(std::span<const std::byte> payload);

/// What HELLO begins with in every version: magic, version_min, version_max.
struct HelloPrefix {
  std::uint16_t version_min{0};
  std::uint16_t version_max{0};
};

/// Errors: invalid_argument when the magic is wrong (that is no kvshard peer) or the range is
/// empty.
Result<HelloPrefix> decode_hello_prefix(std::span<const std::byte> payload);

/// The highest version that both sides speak.
/// Errors: unsupported, naming both ranges, when there is none.
Result<std::uint16_t> choose_version(const HelloPrefix& peer);

}  // namespace kvshard::wire
