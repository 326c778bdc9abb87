#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvshard {

/// What peers can make a prefill rank hold. Beyond a limit a peer is refused, or its oldest unfinished
/// handshake is closed; other peers do not notice. A handshake is everything from accept to WELCOME.
///
/// What one message may hold is fixed (ProtocolLimits); geometry.hpp has what a geometry may declare.
struct ControlLimits {
  std::uint32_t max_peers{1'024};                ///< decode ranks with a session
  std::uint32_t max_peers_per_address{256};      ///< of those, from one IP address
  std::uint32_t max_handshakes{128};             ///< in flight; one more closes the oldest
  std::uint32_t max_handshakes_per_address{32};  ///< likewise, the oldest of that address
  std::chrono::milliseconds handshake_timeout{2'000};
  std::uint32_t max_pulls_per_peer{16'384};  ///< running and waiting together
  std::uint32_t max_waiting_pulls{65'536};   ///< of rooms that are not open yet, of all peers
  std::size_t max_queued_bytes{8U << 20};    ///< to one peer that does not read; beyond it is lost
};

/// Bounds of the protocol: a message beyond one is refused whole, before memory is taken for it.
struct ProtocolLimits {
  static constexpr std::size_t kFrameBytes = 1U << 20;           ///< header included
  static constexpr std::size_t kHandshakeFrameBytes = 2U << 10;  ///< while secrets are being proved
  static constexpr std::size_t kSideDataBytes = 64U << 10;
  static constexpr std::size_t kBlobBytes = 16U << 10;  ///< a transport address, or packed memory
  static constexpr std::size_t kTextBytes = 1'024;  ///< an error's; its sender cuts what is longer
  static constexpr std::size_t kLanes = 256;        ///< of one ASSIGN
  static constexpr std::size_t kPages = 16'384;     ///< of one READY whose pages are mapped
};

}  // namespace kvshard
