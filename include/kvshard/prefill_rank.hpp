#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvshard/copy_engine.hpp"
#include "kvshard/export.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/limits.hpp"
#include "kvshard/registry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/security.hpp"
#include "kvshard/transport.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

class Clock;
class Tracer;
struct PrefillMetrics;

/// How one prefill rank serves its shard of a group's KV cache.
struct PrefillOptions {
  std::string group{"kvshard"};  ///< the group's name, as decode asks for it
  std::uint64_t epoch{1};  ///< one number per launch of the group, the same on all its ranks, not 0
  std::uint32_t shard_rank{0};
  std::uint32_t shard_size{1};
  Pool pool;                             ///< this rank's pages; borrowed until close() returns
  std::string listen_host{"127.0.0.1"};  ///< an IP address; what peers connect to
  std::uint16_t listen_port{0};          ///< 0: any free port

  std::uint64_t slot_payload_bytes{4U << 20};  ///< KV bytes that one staging slot holds
  std::uint32_t slots{8};                      ///< staging slots, shared by all peers
  bool exported{
      true};  ///< let decode ranks on this host map the pool, where its memory can be mapped
  std::uint64_t mapped_piece_bytes{256U
                                   << 20};  ///< KV bytes that a rank that maps it copies at once
  bool checksum{false};  ///< sum each slot while gathering, and check it while scattering

  std::chrono::milliseconds lease{30'000};  ///< a finished room waits this long for its pullers
  std::chrono::milliseconds slot_timeout{
      10'000};  ///< a slot not released for this long is taken back
  std::chrono::milliseconds pull_timeout{
      600'000};  ///< a pull that has not committed by then is ended
  std::chrono::milliseconds heartbeat{1'000};
  std::chrono::milliseconds peer_timeout{4'000};  ///< silence (while we run) that loses a peer

  std::uint32_t max_rooms{65'536};
  SecurityOptions security;  ///< without a secret, listen_host must be a loopback address
  ControlLimits limits;      ///< on what peers can make this rank hold

  /// How long the progress thread polls before it sleeps. Longer costs a core, and saves what a sleeper takes to
  /// wake: some 25 us for each message (docs/tuning.md). From 0 to a year; create() refuses others as
  /// invalid_argument.
  std::chrono::microseconds busy_poll{50};

  bool metrics{true};              ///< time the stages of pulls, for metrics()
  std::shared_ptr<Tracer> tracer;  ///< trace them too (tracer.hpp); null: do not
};

/// Positions whose KV is ready, or will be when `ready` fires.
struct Chunk {
  std::span<const LogicalPage>
      pages;  ///< the chain's pages at positions first_position, +1, ...; copied
  std::uint32_t first_position{0};
  std::uint32_t first_layer{
      0};  ///< as the model numbers them; with layer_count, for layer-wise chunks
  std::uint32_t layer_count{0};  ///< 0: all layers
  EventHandle ready{
      nullptr};  ///< CUDA engines: no byte is read before it; borrowed until the room's event
  std::uint32_t table{0};  ///< whose page numbers these are: BufferGroup::table
  bool last{false};        ///< nothing follows, of any table; each is as long as its chunks reach
  std::span<const std::byte>
      side_data{};  ///< with `last`: up to 64 KiB for the decode side; copied
};

/// A room's end on this rank: its pages are not touched any more and may be freed.
struct RoomEvent {
  RoomId room{};
  Status status;  ///< ok: every puller committed. Otherwise why not: the first failure
};

/// Counters since create(), and gauges. A plain copy.
struct PrefillStats {
  std::uint64_t rooms_opened{0}, rooms_done{0}, rooms_failed{0};
  std::uint64_t pulls_started{0}, pulls_committed{0}, pulls_failed{0};
  std::uint64_t pieces_sent{0}, bytes_sent{0};
  std::uint64_t late_reads{0};  ///< slots taken back from a puller that had not released them
  std::uint64_t stale_commits{0};
  std::uint64_t late_messages{0};  ///< about pulls that had ended; answered or ignored
  std::uint64_t peers_refused{0}, peers_lost{0};
  std::uint64_t handshakes_ended{0};  ///< that took too long, or gave way to newer ones
  // Gauges.
  std::uint64_t rooms{0}, leases{0}, pulls_waiting{0}, slots_in_use{0};
  std::uint64_t peers{0};  ///< with those in a handshake
};

/// The prefill side: lets decode ranks pull the pages that this rank owns.
///
/// Every rank of a group gets the same calls with the same pages and picks its own out of them. A room
/// is one request. Its pages stay pinned from publish() until its RoomEvent.
///
/// Owns:    a progress thread, the staging memory, the listening socket; not the pool.
/// Threads: thread-safe. No call waits for a peer or a device; close() is bounded.
/// Errors:  invalid_argument for what the call got wrong, failed_precondition for a room in the wrong
///          state, resource_exhausted at max_rooms. What happens later comes as a RoomEvent.
/// Cost:    publish() copies the page ids and wakes the progress thread.
/// Source:  docs/architecture.md, "Prefill rank".
class KVSHARD_EXPORT PrefillRank {
 public:
  /// Starts serving. Takes a transport and a copy engine of its own; the engine's memory kind is the
  /// pool's. `clock` is for tests; null is the machine's monotonic clock.
  static Result<std::unique_ptr<PrefillRank>> create(PrefillOptions options,
                                                     std::unique_ptr<Transport> transport,
                                                     std::unique_ptr<CopyEngine> engine,
                                                     const Clock* clock = nullptr);
  ~PrefillRank();
  PrefillRank(const PrefillRank&) = delete;
  PrefillRank& operator=(const PrefillRank&) = delete;

  /// Where decode ranks connect: this rank as a member of its group.
  [[nodiscard]] GroupMember member() const;
  /// This rank as a registry announces it.
  [[nodiscard]] RankAnnouncement announcement() const;

  /// Announces a request that `pullers` decode ranks (or samples) will pull, each once.
  Status open(RoomId room, std::uint32_t pullers = 1);
  /// Publishes a chunk. Chunks of a room may come in any order of positions and layers; each position
  /// must belong to one cyclic chain. A rank that owns none of the pages is called all the same.
  Status publish(RoomId room, const Chunk& chunk);
  /// Gives the room up: pullers hear it at once, with `reason`.
  Status abort(RoomId room, std::string reason);

  /// Fills `events` with rooms that ended; returns how many. Never waits.
  std::size_t poll(std::span<RoomEvent> events);
  /// Readable while poll() has something, for epoll; owned by the rank.
  [[nodiscard]] int event_fd() const noexcept;

  [[nodiscard]] PrefillStats stats() const;
  /// Where the time goes, by stage (metrics.hpp). 12 KB a copy.
  [[nodiscard]] PrefillMetrics metrics() const;

  /// Aborts all rooms, tells the peers, and stops the thread, within about two seconds. Afterwards the
  /// pool is not touched; poll() still gives the last events. May be called twice.
  void close() noexcept;

 private:
  class Impl;
  explicit PrefillRank(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
