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
#include "kvshard/registry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/security.hpp"
#include "kvshard/transport.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

class Clock;
class Tracer;
struct DecodeMetrics;

/// A connected group, as connect() names it. Never reused within a DecodeRank.
enum class GroupId : std::uint64_t {};
/// One pull, as pull() names it. Never reused within a DecodeRank.
enum class PullId : std::uint64_t {};

/// Whether a decode rank copies straight from the pages of prefill ranks whose pool it can map.
enum class Mapped : std::uint8_t {
  automatic,  ///< GPU memory, where mapping works; what is not mapped goes through slots, and says why
  never,
  always,  ///< refused at connect where it does not work, with the reason
};

struct DecodeOptions {
  Pool pool;  ///< this rank's pages; borrowed until close() returns
  std::uint64_t landing_payload_bytes{4U << 20};  ///< KV bytes that one landing slot holds
  std::uint32_t landing_slots{8};                 ///< shared by all pulls
  std::uint32_t window{2};  ///< slots that one pull may hold on each prefill rank at once

  Mapped mapped{Mapped::automatic};

  std::chrono::milliseconds heartbeat{1'000};
  std::chrono::milliseconds peer_timeout{4'000};  ///< silence (while we run) that loses a peer
  std::chrono::milliseconds fetch_timeout{
      4'000};  ///< one slot's transfer; longer means the peer hangs
  std::chrono::milliseconds reconnect_min{
      50};  ///< back-off after a loss: doubled up to the maximum, jittered
  std::chrono::milliseconds reconnect_max{2'000};
  std::uint32_t max_pulls{65'536};
  SecurityOptions security;  ///< without a secret, only loopback addresses can be connected to

  /// How long the progress thread polls before it sleeps. Longer costs a core, and saves what a sleeper takes to
  /// wake: some 25 us for each message (docs/tuning.md). From 0 to a year; create() refuses others as
  /// invalid_argument.
  std::chrono::microseconds busy_poll{50};

  bool metrics{true};              ///< time the stages of pulls, for metrics()
  std::shared_ptr<Tracer> tracer;  ///< trace them too (tracer.hpp); null: do not
};

/// How one source rank did in one pull. With N sources the slowest decides.
struct SourceTiming {
  std::uint32_t shard_rank{0};
  std::uint64_t pieces{0}, bytes{0};
  std::chrono::nanoseconds first_ready{0};  ///< from pull() to its first piece
  std::chrono::nanoseconds landed{0};       ///< from pull() to its last byte in our pages
  std::chrono::nanoseconds landing{0};      ///< its pieces waited for landing slots, summed
  std::chrono::nanoseconds wire{0};         ///< summed over its fetches
  std::chrono::nanoseconds scatter{0};      ///< summed over its copies into pages
};

struct SideData {
  std::uint32_t shard_rank{0};
  std::vector<std::byte> bytes;
};

/// A pull's one terminal event.
struct PullEvent {
  PullId pull{};
  RoomId room{};
  Status status{};                    ///< ok: every byte is in its page and was valid to the end
  std::vector<SideData> side_data{};  ///< from each rank that sent some, by shard rank
  std::uint64_t bytes{0};
  std::chrono::nanoseconds total{0};
  std::chrono::nanoseconds connect{
      0};  ///< before any rank was asked: the queue, and sessions to be made
  std::chrono::nanoseconds commit{0};  ///< from the last byte to the last verdict
  TransferPath path{TransferPath::automatic};
  std::vector<SourceTiming> sources{};  ///< by shard rank
};

/// Hears a pull's end on the progress thread, once, instead of poll(). Must not block or call close().
class PullListener {
 public:
  virtual void pull_done(const PullEvent& event) noexcept = 0;

 protected:
  ~PullListener() = default;
};

/// Where the pages of one table go: this rank's own pages at the positions from first_position on.
///
/// By page with `parts` > 1 the rank has every parts-th position, those that are its part's in a chain
/// whose position 0 is on part `base`; otherwise it has every position. Positions count pages of this
/// side's page_size (interleaved: of page_size tokens of every part).
struct PullPages {
  std::uint32_t table{0};            ///< BufferGroup::table
  std::span<const LocalPage> pages;  ///< copied
  std::uint32_t first_position{0};   ///< what decode lacks starts here
  std::uint32_t skip_tokens{0};      ///< and of that page, behind so many tokens
  std::uint32_t end_position{0};  ///< where the request ends; 0: at first_position + pages.size()
  std::uint32_t base{0};
};

struct PullRequest {
  GroupId group{};
  RoomId room{};
  std::span<const LocalPage> pages;  ///< of table 0, as in PullPages
  std::uint32_t first_position{0};
  std::uint32_t skip_tokens{0};
  std::uint32_t end_position{0};
  std::uint32_t base{0};
  std::span<const PullPages> more_tables{};  ///< besides table 0; copied
  EventHandle after{
      nullptr};  ///< CUDA engines: no page is written before it; borrowed until the event
  /// CUDA engines: what is enqueued here after pull() returns waits until the pull has ended, well or not;
  /// its event, which is there by then, says which.
  StreamHandle stream{nullptr};
  std::chrono::milliseconds deadline{60'000};  ///< for the whole pull
  PullListener* listener{
      nullptr};  ///< borrowed until pull_done() returns; null: the event comes by poll()
};

/// One line for an operator: room, outcome, path, bytes, rate, the slowest rank, and what took it most of its
/// time.
KVSHARD_EXPORT std::string summarize(const PullEvent& event);

/// Counters since create(), and gauges. A plain copy. started = done + failed + cancelled + pulls.
struct DecodeStats {
  std::uint64_t pulls_started{0}, pulls_done{0}, pulls_failed{0}, pulls_cancelled{0};
  std::uint64_t pieces{0}, bytes{0};
  std::uint64_t stale{0};  ///< pulls that failed because a rank's bytes had not stayed valid
  std::uint64_t late_messages{0};
  std::uint64_t peers_lost{0}, reconnects{0};
  std::uint64_t pulls{0}, landing_in_use{0}, quarantined{0}, peers{0};  // gauges
};

/// The decode side: pulls a request's pages from every rank of a prefill group into its own pages.
///
/// Owns:    a progress thread, the landing memory, one session per prefill rank; not the pool.
/// Threads: thread-safe. Only connect() waits, to its deadline.
/// Errors:  invalid_argument for what a call got wrong; everything later comes as the pull's one event:
///          unavailable (peer gone, choose another), data_loss (the bytes did not stay valid), cancelled,
///          deadline_exceeded, failed_precondition (the peer's state or layout does not fit).
/// Cost:    pull() copies the page ids and wakes the progress thread.
/// Source:  docs/architecture.md, "Decode rank".
class KVSHARD_EXPORT DecodeRank {
 public:
  /// Takes a transport and a copy engine of its own. `clock` is for tests; null is the machine's.
  static Result<std::unique_ptr<DecodeRank>> create(DecodeOptions options,
                                                    std::unique_ptr<Transport> transport,
                                                    std::unique_ptr<CopyEngine> engine,
                                                    const Clock* clock = nullptr);
  ~DecodeRank();
  DecodeRank(const DecodeRank&) = delete;
  DecodeRank& operator=(const DecodeRank&) = delete;

  /// Opens sessions with every rank of the group, or joins those that exist or are being made for the
  /// same name, epoch and members. A lost session is made anew in the background from then on.
  /// Errors: deadline_exceeded; failed_precondition naming the field that does not fit and both values;
  ///         invalid_argument when the group is not whole.
  Result<GroupId> connect(const GroupSpec& group, std::chrono::milliseconds deadline);
  /// Ends the group's sessions and its pulls. Does nothing while connect() calls wait for the group.
  void disconnect(GroupId group);
  /// How the bytes of a group's rank travel. Errors: invalid_argument for an unknown group or rank.
  [[nodiscard]] Result<PathReport> path(GroupId group, std::uint32_t shard_rank) const;

  /// Starts a pull. Its one event comes later, whatever happens.
  Result<PullId> pull(const PullRequest& request);
  /// Gives a pull up; its event then says cancelled, unless it had ended. Idempotent.
  void cancel(PullId pull);

  /// Fills `events` with pulls that ended; returns how many. Never waits.
  std::size_t poll(std::span<PullEvent> events);
  /// Readable while poll() has something, for epoll; owned by the rank.
  [[nodiscard]] int event_fd() const noexcept;

  [[nodiscard]] DecodeStats stats() const;
  /// Where the time goes, by stage and by source rank (metrics.hpp). 12 KB a copy, and 2 KB for each
  /// source rank.
  [[nodiscard]] DecodeMetrics metrics() const;

  /// Ends all pulls, says goodbye, and stops the thread, within about two seconds. Afterwards the pool
  /// is not touched; poll() still gives the last events. May be called twice.
  void close() noexcept;

 private:
  class Impl;
  explicit DecodeRank(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
