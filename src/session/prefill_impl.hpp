#pragma once

#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/clock.hpp"
#include "base/log_limit.hpp"
#include "base/mutex.hpp"
#include "base/random.hpp"
#include "control/admission.hpp"
#include "control/authority.hpp"
#include "control/connection.hpp"
#include "kvshard/pool_mapping.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/send_filter.hpp"
#include "session/event_queue.hpp"
#include "session/pool_view.hpp"
#include "session/progress_thread.hpp"
#include "session/recorder.hpp"
#include "session/slot_table.hpp"
#include "wire/codec.hpp"
#include "wire/messages.hpp"

namespace kvshard {

// A prefill rank, implemented in prefill_rank.cpp (set-up, public calls, time), prefill_peers.cpp (control
// connections), prefill_rooms.cpp (rooms and leases) and prefill_slots.cpp (slots).
//
// All state but front_ and events_ is used on the progress thread only; public calls check what they can
// against front_ and post the rest.
class PrefillRank::Impl final : public SlotTable::Owner {
 public:
  // How this rank holds a table's pages.
  struct OwnTable {
    std::uint32_t number;
    const BufferGroup*
        group;  // of options_: one of the table's groups, for what they have in common
    // By page it picks this rank's pages; interleaved, the rank has its part of every page, and so is a
    // shard of one.
    SendFilter filter;
    std::uint32_t page_count;
    std::uint32_t layers;  // of the model, in any of its groups
  };

  static Result<std::vector<OwnTable>> own_tables(const Geometry& geometry);

  Impl(PrefillOptions options, const Clock& clock)
      : options_{std::move(options)},
        clock_{clock},
        incarnation_{random_id()},
        recorder_{options_.metrics, options_.tracer.get(),
                  fmt::format("prefill {}", options_.shard_rank), clock} {}
  ~Impl();

  Status start(std::unique_ptr<Transport> transport, std::unique_ptr<CopyEngine> engine);

  // Any thread.
  [[nodiscard]] GroupMember member() const;
  [[nodiscard]] RankAnnouncement announcement() const;
  Status open(RoomId room, std::uint32_t pullers);
  Status publish(RoomId room, const Chunk& chunk);
  Status abort(RoomId room, std::string reason);
  std::size_t poll(std::span<RoomEvent> events) { return events_.poll(events); }
  [[nodiscard]] int event_fd() const noexcept { return events_.fd(); }
  [[nodiscard]] PrefillStats stats() const { return counters::snapshot(stats_); }
  [[nodiscard]] PrefillMetrics metrics() const;
  void close() noexcept;

 private:
  // What public calls check against, before anything is posted.
  struct FrontRoom {
    bool last{false};
    struct Table {
      std::optional<std::uint32_t>
          base;  // owner of position 0: all chunks continue one cyclic chain
      std::uint64_t end_position{0};
    };
    std::vector<Table> tables;  // as own_tables_
  };

  // The owned part of a published chunk.
  struct OwnedChunk {
    const OwnTable* table{nullptr};
    std::vector<LocalPage> pages;
    std::uint64_t first_page{0};  // number of pages[0] among the rank's pages of the room
    std::uint32_t base{0};
    std::uint32_t first_layer{0}, layer_count{0};
    EventHandle ready{nullptr};
  };

  struct Room {
    RoomId id{};
    std::uint32_t unclaimed{0};  // pullers that have not come yet
    std::vector<OwnedChunk> chunks;
    std::optional<std::vector<wire::TableEnd>> ends;  // by table, once the last chunk is here
    TimePoint expires{};                              // for the unclaimed, from the last chunk on
    std::optional<std::list<Room*>::iterator> expiring;
    std::vector<std::byte> side_data;
    std::vector<std::uint64_t> leases;  // live ones
    std::uint32_t gathering{0};         // slots that read its pages now
    Status status;                      // the first failure
  };

  struct Peer;

  // A hold on a room's pages for one pull, from PULL to COMMIT, ABORT or poisoning.
  struct Lease {
    std::uint64_t id{0};
    Peer* peer{nullptr};
    Room* room{nullptr};
    std::uint64_t pull{0};
    std::uint32_t window{1};
    TimePoint claimed{};
    bool queued{false};
    TimePoint queued_at{};

    // What it wants of each table of the peer's plan.
    struct Want {
      wire::PullTable tokens;
      const TransferPlan::Table* table;
      std::optional<UnitList> units;  // from the first chunk on, which tells the chain's base
      UnitList::Range range;
    };
    std::vector<Want> wants;

    // Where it stands in the room's chunks: cutters of chunk `chunk`, the next one last.
    std::size_t chunk{0};
    bool chunk_begun{false};
    const Want* want{nullptr};
    std::vector<PieceCutter> cutters;

    struct SentPiece {
      std::uint32_t slot;
      std::uint64_t generation;
      std::uint64_t payload_bytes;
      bool released;
    };
    std::vector<SentPiece> pieces;
    std::size_t announced{0};  // of them
    std::uint32_t slots{0};    // gathering or exposed
    std::uint32_t gathering{0};
    std::uint32_t unreleased{0};
    bool last_sent{false};
    TimePoint deadline{};  // for COMMIT
    std::list<Lease*>::iterator by_age;
  };

  struct WaitingPull {
    std::uint64_t peer;
    wire::Pull pull;
    TimePoint arrived, deadline;
  };

  // One decode rank's control connection.
  struct Peer final : ConnectionListener {
    Peer(Impl& rank_, std::uint64_t id_, std::string name_)
        : rank{rank_}, id{id_}, name{std::move(name_)} {}
    void connection_open() noexcept override {}
    void connection_frame(wire::MessageType type,
                          std::span<const std::byte> payload) noexcept override {
      rank.on_frame(*this, type, payload);
    }
    void connection_closed(Error error) noexcept override {
      rank.connection_lost(*this, std::move(error));
    }

    Impl& rank;
    std::uint64_t id;
    std::string name;
    std::unique_ptr<Connection> connection;
    TimePoint ping_due{};
    std::uint64_t pings{0};
    bool welcomed{false};
    Geometry geometry;
    std::optional<PoolView> view;  // from ASSIGN on
    bool mapped{false};            // it copies from the pool itself
    std::uint64_t capacity{0};
    std::unordered_map<std::uint64_t, std::uint64_t> leases;  // pull -> lease id
    // Pulls of rooms that are not open yet, in waiting_.
    std::unordered_map<std::uint64_t, std::list<WaitingPull>::iterator> waiting;
    std::uint32_t slots{0};
    std::deque<std::uint64_t> parked;  // leases that wait for this peer's share of slots
  };

  // Control.
  void on_accept(UniqueFd fd, std::string name);
  void on_frame(Peer& peer, wire::MessageType type, std::span<const std::byte> payload) noexcept;
  template <typename Message>
  void dispatch(Peer& peer, std::span<const std::byte> payload,
                void (Impl::*handler)(Peer&, Message&));
  void on_hello(Peer& peer, std::span<const std::byte> payload);
  Status check_hello(const wire::Hello& hello) const;
  void on_assign(Peer& peer, wire::Assign& assign);
  static Status check_pull(const Peer& peer, const wire::Pull& pull);
  void on_pull(Peer& peer, wire::Pull& pull);
  void on_release(Peer& peer, wire::Release& release);
  void on_commit(Peer& peer, wire::Commit& commit);
  void on_abort(Peer& peer, wire::Abort& abort);
  void stop_waiting(Peer& peer, std::uint64_t pull);
  void refuse(Peer& peer, Error error);
  void log_refusal(const Peer& peer, const Error& error);
  void connection_lost(Peer& peer, Error error) noexcept;
  void end_handshake(std::uint64_t peer, Error error);
  void lose_peer(Peer& peer, Error error) noexcept;

  // Rooms and leases.
  void open_room(RoomId room, std::uint32_t pullers);
  void add_chunk(RoomId room, OwnedChunk chunk, std::optional<std::vector<wire::TableEnd>> ends,
                 std::vector<std::byte> side_data);
  void abort_room(RoomId room, Error error);
  void claim(Peer& peer, Room& room, const wire::Pull& pull);
  [[nodiscard]] Status check_ends(const Lease& lease) const;
  std::string commit_problem(const Lease& lease, const wire::Commit& commit) const;
  enum class Tell : bool { no, yes };
  void end_lease(Lease& lease, Status status, Tell tell);
  void end_room_if_idle(Room& room);

  // Slots.
  void enqueue(Lease& lease);
  bool advance(Lease& lease);
  void begin_chunk(Lease& lease, const OwnedChunk& chunk) const;
  void finish_if_drained(Lease& lease);
  void pump();
  bool gather(Lease& lease);
  [[nodiscard]] std::size_t share() const noexcept;
  void unpark(Peer& peer);
  void slot_gathered(std::uint32_t index, Status status) noexcept override;
  void announce(Lease& lease);
  void free_slot(SlotTable::Slot& slot);
  [[nodiscard]] Span slot_span(Stage stage, const SlotTable::Slot& slot, TimePoint begin,
                               TimePoint end) const;

  void sweep();
  void begin_close();
  void finish_close();

  template <typename Fn>
  void post(Fn fn) {
    thread_->loop().post(std::move(fn));
  }
  [[nodiscard]] TimePoint now() const noexcept { return thread_->loop().now(); }

  const PrefillOptions options_;
  std::vector<OwnTable> own_tables_;  // set by start(), then constant
  const Clock& clock_;
  const std::uint64_t incarnation_;
  std::uint64_t slot_stride_{0};
  std::uint16_t port_{0};
  bool started_{false};

  mutable Mutex front_mutex_;
  std::unordered_map<RoomId, FrontRoom> front_ KVSHARD_GUARDED_BY(front_mutex_);
  bool closing_ KVSHARD_GUARDED_BY(front_mutex_){false};
  bool closed_ KVSHARD_GUARDED_BY(front_mutex_){false};
  std::condition_variable_any closed_changed_;
  EventQueue<RoomEvent> events_;
  mutable PrefillStats stats_;
  // Of PrefillMetrics.
  struct Counts {
    EndCounts pulls{}, rooms{};
    std::uint64_t fragments{0}, peers_connected{0}, oldest_lease_ns{0};
  };
  mutable Counts counts_;
  Recorder recorder_;

  std::unique_ptr<PoolExport> pool_export_;  // null when the pool cannot be mapped
  std::unique_ptr<StagingMemory> staging_memory_;
  std::unique_ptr<ProgressThread> thread_;
  std::unique_ptr<RegisteredMemory> staging_;
  std::optional<SlotTable> slots_;
  std::optional<Authority> authority_;  // set by start()
  Admission admission_{options_.limits};
  log::Limit refusals_;
  std::unique_ptr<Listener> listener_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Peer>> peers_;
  std::unordered_map<RoomId, std::unique_ptr<Room>> rooms_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Lease>> leases_;
  // In the order of their deadlines, since each kind has one time for all: a look at time costs what is due.
  std::list<Lease*> by_age_;
  std::list<Room*> expiring_;
  std::unordered_map<RoomId, std::list<WaitingPull>> waiting_;
  struct Ended {
    std::uint64_t number;  // tells a room's last end from one before it was opened again
    std::string why;
  };
  std::unordered_map<RoomId, Ended> ended_;  // for late PULLs
  std::deque<std::pair<std::uint64_t, RoomId>> ended_order_;
  std::uint64_t ended_count_{0};
  std::unordered_map<RoomId, std::uint32_t>
      given_up_;  // pulls aborted before their room was opened
  std::deque<RoomId> given_up_order_;
  std::deque<std::uint64_t> run_queue_;  // leases with work, each at most once
  std::uint64_t next_peer_{1};
  std::uint64_t next_lease_{1};
  PoolView::Selection selection_;
  TimePoint swept_{};  // when sweep() last ran
  TimePoint close_deadline_{};
  bool draining_{false};
};

}  // namespace kvshard
