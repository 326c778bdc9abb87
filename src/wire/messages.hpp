#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/limits.hpp"
#include "kvshard/plan.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

// What travels on the control connection; docs/wire_format.md gives the bytes.
namespace kvshard::wire {

inline constexpr std::uint32_t kMagic = 0x3153564bU;  // "KVS1" as little-endian bytes
inline constexpr std::uint16_t kProtocolVersion = 1;

/// Bounds on what a peer may send; a message beyond one is refused whole.
inline constexpr std::size_t kMaxFrameBytes = ProtocolLimits::kFrameBytes;
inline constexpr std::size_t kMaxSideDataBytes = ProtocolLimits::kSideDataBytes;
inline constexpr std::size_t kMaxBlobBytes = ProtocolLimits::kBlobBytes;
inline constexpr std::size_t kMaxMessageTextBytes = ProtocolLimits::kTextBytes;
inline constexpr std::size_t kMaxLanes = ProtocolLimits::kLanes;
inline constexpr std::size_t kMaxPages = ProtocolLimits::kPages;

enum class MessageType : std::uint8_t {
  hello = 1,
  welcome = 2,
  pull = 3,
  ready = 4,
  release = 5,
  commit = 6,
  verdict = 7,
  abort = 8,
  ping = 9,
  bye = 10,
  authenticate = 11,
  challenge = 12,
  proof = 13,
  assign = 14,
};

/// decode -> prefill, first on a connection.
struct Hello {
  std::uint16_t version_min{kProtocolVersion};
  std::uint16_t version_max{kProtocolVersion};
  std::uint64_t incarnation{0};  ///< of the decode process
  std::string group;             ///< the group that is meant; empty: any
  std::uint64_t epoch{0};        ///< of that group; 0: any
  std::uint32_t shard_rank{0};   ///< who is meant
  std::uint32_t shard_size{0};
  std::string transport;  ///< Transport::kind()
  Geometry geometry;
  std::uint64_t landing_payload_bytes{0};  ///< the largest piece that decode can land
  std::uint32_t heartbeat_ms{0};           ///< how often decode sends PING
};

/// prefill -> decode: accepted. A refusal is BYE.
struct Welcome {
  std::uint16_t version{kProtocolVersion};
  std::uint64_t incarnation{0};
  std::uint64_t epoch{0};
  std::uint32_t shard_rank{0};
  std::uint32_t shard_size{0};
  Geometry geometry;
  std::vector<std::byte> transport_address;
  std::vector<std::byte> staging;  ///< RegisteredMemory::packed()
  std::vector<std::byte> pool;     ///< PoolExport::bytes(); empty when pages cannot be mapped
  std::uint32_t slot_count{0};
  std::uint64_t slot_stride{0};  ///< bytes from one slot to the next in the staging memory
  std::uint32_t heartbeat_ms{0};
};

/// decode -> prefill, once, when decode has the WELCOME of every rank of the group: what this rank gives,
/// by assign_lanes(). Both make a TransferPlan of it; buffers and units are numbered as there.
struct Assign {
  std::vector<Lane> lanes;
  bool mapped{false};  ///< decode has mapped the pool of WELCOME and copies from its pages
};

/// What a pull wants of one table: the decode rank's tokens among [first_token, end_token).
struct PullTable {
  std::uint32_t table{0};
  std::uint32_t phase{0};  ///< of the decode rank's pages
  std::uint64_t first_token{0};
  std::uint64_t end_token{0};

  friend bool operator==(const PullTable&, const PullTable&) = default;
};

/// decode -> prefill: send me what you were assigned of a room. `pull` is unique on its connection.
struct Pull {
  std::uint64_t pull{0};
  RoomId room{};
  std::uint32_t window{0};   ///< slots that may be exposed for this pull at once
  std::uint32_t wait_ms{0};  ///< how long the room may take to be opened
  std::vector<PullTable> tables{};
};

/// How much of a table a room has, and the rotation base of its chain (0 where pages do not rotate).
struct TableEnd {
  std::uint32_t table{0};
  std::uint32_t base{0};
  std::uint64_t end_token{0};

  friend bool operator==(const TableEnd&, const TableEnd&) = default;
};

/// prefill -> decode: one piece is in a slot: units [first_unit, +unit_count) in the buffers [first_buffer,
/// +buffer_count), which are of one table. For a decode rank that maps the pool the slot stays empty, and
/// `pages` says where the bytes are: the prefill rank's pages of these units, from the first unit's on.
/// The last READY of a pull has `last`, no payload, the tables' ends and the side data.
struct Ready {
  std::uint64_t pull{0};
  std::uint64_t lease{0};
  std::uint64_t piece{0};  ///< 0, 1, 2, ... within the lease
  std::uint32_t slot{0};
  std::uint64_t generation{0};
  std::uint64_t payload_bytes{0};
  std::uint32_t first_buffer{0};
  std::uint32_t buffer_count{0};
  std::uint32_t base{0};  ///< rotation base of the chain
  std::uint64_t first_unit{0};
  std::uint32_t unit_count{0};
  bool partial{false};  ///< of one unit, only the tokens from the pull's first_token on
  bool last{false};
  bool checksum{false};
  std::vector<LocalPage> pages{};
  std::vector<TableEnd> tables{};
  std::vector<std::byte> side_data{};
};

/// decode -> prefill: the slot's bytes have been read.
struct Release {
  std::uint64_t pull{0};
  std::uint64_t piece{0};
  std::uint32_t slot{0};
  std::uint64_t generation{0};
};

/// decode -> prefill: everything was read; was it valid to the end?
struct Commit {
  std::uint64_t pull{0};
  std::uint64_t pieces{0};  ///< how many pieces were read
  std::uint64_t digest{0};  ///< PieceDigest over them
};

/// prefill -> decode: the answer to COMMIT.
struct Verdict {
  std::uint64_t pull{0};
  bool valid{false};
  std::string reason;  ///< why it is stale
};

/// Either side gives a pull up. Idempotent.
struct Abort {
  std::uint64_t pull{0};
  Error error;
};

/// Heartbeat, sent by both sides on their own clock; any message counts as a sign of life.
struct Ping {
  std::uint64_t sequence{0};
};

/// The last message on a connection: a refusal, or a goodbye.
struct Bye {
  Error error;
};

/// Random bytes of one side, for one connection; and what HMAC-SHA256 gives.
using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;

/// decode -> prefill, first on a connection of sides that share a secret, before HELLO.
struct Authenticate {
  std::uint16_t version_min{kProtocolVersion};
  std::uint16_t version_max{kProtocolVersion};
  Nonce nonce{};
};

/// prefill -> decode: the answer to AUTHENTICATE.
struct Challenge {
  std::uint16_t version{kProtocolVersion};
  Nonce nonce{};
};

/// decode -> prefill, then prefill -> decode: whoever sends this knows the secret.
struct Proof {
  Mac mac{};
};

/// What COMMIT compares: an order-dependent hash of every (piece, slot, generation, payload_bytes).
class PieceDigest {
 public:
  void add(std::uint64_t piece, std::uint32_t slot, std::uint64_t generation,
           std::uint64_t payload_bytes) noexcept {
    for (const std::uint64_t word : {piece, std::uint64_t{slot}, generation, payload_bytes}) {
      value_ ^= word;
      value_ *= 0x9e3779b97f4a7c15U;
      value_ ^= value_ >> 29;
    }
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_{0x6b76736861726431U};
};

}  // namespace kvshard::wire
