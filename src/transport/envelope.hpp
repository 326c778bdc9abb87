#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/result.hpp"

// What a transport's opaque bytes travel in. A peer's worker address goes into C code that trusts
// it, so nothing is handed on before kind, length and checksum fit. The checksum finds damage, not
// malice: against that stands the control connection, which authenticates before it hands out an
// address.
namespace kvshard::transport {

enum class EnvelopeKind : std::uint32_t {
  loopback_address = 1,
  loopback_memory = 2,
  ucx_address = 3,
  ucx_memory = 4,
};

/// Header: magic, version, kind (u32 each), u32 payload length, u64 FNV-1a of all that and the
/// payload; little-endian.
inline constexpr std::size_t kEnvelopeHeaderBytes = 24;
/// A UCX worker address of a machine with many devices takes a few KiB.
inline constexpr std::size_t kMaxEnvelopePayloadBytes = 64U << 10;

/// Requires payload.size() <= kMaxEnvelopePayloadBytes.
std::vector<std::byte> seal(EnvelopeKind kind, std::span<const std::byte> payload);

/// The payload, a part of `bytes`. Errors: invalid_argument (another kind, version, or no envelope
/// at all) or data_loss (truncated or damaged), naming the field and both values.
Result<std::span<const std::byte>> unseal(EnvelopeKind kind, std::span<const std::byte> bytes);

}  // namespace kvshard::transport
