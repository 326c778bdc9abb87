#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "control/hmac.hpp"
#include "control/secret_file.hpp"
#include "kvshard/result.hpp"
#include "wire/codec.hpp"

// How two sides prove to each other that they share a secret, and how every frame is protected from
// then on; docs/wire_format.md, section 5. Pure: bytes in, bytes out.
namespace kvshard {

/// The MAC of one direction's frames. Each covers the frame's number too, so that a frame that was
/// changed, left out, sent again or moved is found.
class FrameMac {
 public:
  static constexpr std::size_t kBytes = 16;

  explicit FrameMac(HmacKey key) noexcept : key_{std::move(key)} {}

  /// Seals the frame that `out` holds from `frame` on: the MAC is appended and counted in its header.
  Status seal(std::vector<std::byte>& out, std::size_t frame);
  /// The payload of a sealed frame. Errors: failed_precondition, when the next frame was another one.
  Result<std::span<const std::byte>> open(std::span<const std::byte> frame);

 private:
  Result<wire::Mac> compute(std::span<const std::byte> frame);

  HmacKey key_;
  std::uint64_t number_{0};  // of the next frame
};

/// One connection's handshake, from either side:
///   AUTHENTICATE ->  <- CHALLENGE  PROOF ->  <- PROOF
/// The decode rank proves itself first: whoever merely connects to a prefill rank learns nothing.
class Handshake {
 public:
  enum class Side : std::uint8_t { decode, prefill };

  Handshake(Side side, std::shared_ptr<Secrets> secrets) noexcept
      : side_{side},
        secrets_{std::move(secrets)},
        expected_{side == Side::decode ? wire::MessageType::challenge
                                       : wire::MessageType::authenticate} {}

  /// Decode's first frame.
  Status start(std::vector<std::byte>& out);
  /// Takes the peer's next frame, and appends the answer to `out`. True: both have proved themselves.
  /// Errors: failed_precondition when the peer knows none of our secrets, or uses none; unsupported,
  /// naming both, for a protocol version that is not spoken here; the peer's own words when it said BYE.
  Result<bool> take(wire::MessageType type, std::span<const std::byte> frame,
                    std::vector<std::byte>& out);

  /// After take() said true.
  [[nodiscard]] FrameMac take_sending() { return std::move(*sending_); }
  [[nodiscard]] FrameMac take_receiving() { return std::move(*receiving_); }

 private:
  Result<bool> challenge(std::span<const std::byte> frame, std::vector<std::byte>& out);
  Result<bool> prove(std::span<const std::byte> frame, std::vector<std::byte>& out);
  Result<bool> check_decode(std::span<const std::byte> payload, std::vector<std::byte>& out);
  Result<bool> check_prefill(std::span<const std::byte> payload);
  Status make_keys(HmacKey& secret);

  Side side_;
  std::shared_ptr<Secrets> secrets_;   // as they were when the connection began
  wire::MessageType expected_;         // the next frame's type
  std::vector<std::byte> transcript_;  // the AUTHENTICATE and CHALLENGE frames
  std::optional<FrameMac> sending_, receiving_;
};

}  // namespace kvshard
