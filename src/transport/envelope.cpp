#include "transport/envelope.hpp"

#include <fmt/format.h>

#include "base/assert.hpp"
#include "transport/bytes.hpp"

namespace kvshard::transport {
namespace {

constexpr std::uint32_t kMagic = 0x5845564BU;  // "KVEX"
constexpr std::uint32_t kVersion = 1;

// Each step is a bijection of the hash, so one changed byte always changes the result.
std::uint64_t fnv1a(std::uint64_t hash, std::span<const std::byte> bytes) noexcept {
  for (const auto byte : bytes) hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001B3ULL;
  return hash;
}

std::uint64_t checksum(std::span<const std::byte> fields,
                       std::span<const std::byte> payload) noexcept {
  return fnv1a(fnv1a(0xCBF29CE484222325ULL, fields), payload);
}

}  // namespace

std::vector<std::byte> seal(EnvelopeKind kind, std::span<const std::byte> payload) {
  KVSHARD_ASSERT(payload.size() <= kMaxEnvelopePayloadBytes);
  ByteWriter out;
  out.u32(kMagic).u32(kVersion).u32(static_cast<std::uint32_t>(kind));
  out.u32(static_cast<std::uint32_t>(payload.size()));
  out.u64(checksum(out.bytes(), payload)).raw(payload);
  return std::move(out).take();
}

Result<std::span<const std::byte>> unseal(EnvelopeKind kind, std::span<const std::byte> bytes) {
  const auto refuse = [](ErrorCode code, std::string_view field, std::uint64_t found,
                         std::uint64_t wanted) {
    return Error{
        code, fmt::format("peer's transport bytes: {} is {:#x}, want {:#x}", field, found, wanted)};
  };
  if (bytes.size() < kEnvelopeHeaderBytes)
    return refuse(ErrorCode::data_loss, "length", bytes.size(), kEnvelopeHeaderBytes);
  ByteReader in{bytes.first(kEnvelopeHeaderBytes)};
  if (const auto magic = in.u32(); magic != kMagic)
    return refuse(ErrorCode::invalid_argument, "magic", magic, kMagic);
  if (const auto version = in.u32(); version != kVersion)
    return refuse(ErrorCode::invalid_argument, "version", version, kVersion);
  if (const auto found = in.u32(); found != static_cast<std::uint32_t>(kind))
    return refuse(ErrorCode::invalid_argument, "kind", found, static_cast<std::uint32_t>(kind));
  const auto payload = bytes.subspan(kEnvelopeHeaderBytes);
  if (const auto length = in.u32(); length != payload.size() || length > kMaxEnvelopePayloadBytes)
    return refuse(ErrorCode::data_loss, "payload length", payload.size(), length);
  const auto wanted = in.u64();
  if (const auto found = checksum(bytes.first(kEnvelopeHeaderBytes - sizeof wanted), payload);
      found != wanted)
    return refuse(ErrorCode::data_loss, "checksum", found, wanted);
  return payload;
}

}  // namespace kvshard::transport
