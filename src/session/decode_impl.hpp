#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "base/random.hpp"
#include "control/authority.hpp"
#include "control/connection.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/pool_mapping.hpp"
#include "session/event_queue.hpp"
#include "session/pool_view.hpp"
#include "session/progress_thread.hpp"
#include "session/recorder.hpp"
#include "wire/codec.hpp"
#include "wire/messages.hpp"

namespace kvshard {

// A decode rank, implemented in decode_rank.cpp (set-up, public calls, time), decode_groups.cpp (groups and
// their sessions) and decode_pulls.cpp (pulls and landing slots).
//
// All state but front_* and events_ is used on the progress thread only.
class DecodeRank::Impl {
 public:
  Impl(DecodeOptions options, const Clock& clock)
      : options_{std::move(options)},
        clock_{clock},
        incarnation_{random_id()},
        recorder_{options_.metrics, options_.tracer.get(), "decode", clock} {}
  ~Impl();

  Status start(std::unique_ptr<Transport> transport, std::unique_ptr<CopyEngine> engine);

  // Any thread.
  Result<GroupId> connect(const GroupSpec& spec, std::chrono::milliseconds deadline);
  void disconnect(GroupId group);
  [[nodiscard]] Result<PathReport> path(GroupId group, std::uint32_t shard_rank) const;
  Result<PullId> pull(const PullRequest& request);
  void cancel(PullId pull);
  std::size_t poll(std::span<PullEvent> events) { return events_.poll(events); }
  [[nodiscard]] int event_fd() const noexcept { return events_.fd(); }
  [[nodiscard]] DecodeStats stats() const { return counters::snapshot(stats_); }
  [[nodiscard]] DecodeMetrics metrics() const;
  void close() noexcept;

 private:
  // What a source rank did, over all its sessions. Written on the progress thread, read on any.
  struct SourceCounts {
    std::uint64_t connected{0};  // gauge
    std::uint64_t pieces{0}, bytes{0}, slowest{0};
    DurationHistogram wait, wire;
  };

  struct FrontGroup {
    GroupSpec spec;
    std::uint32_t waiters{0};
    bool ready{false};             // all sessions are up, now or once
    std::optional<Error> refused;  // will not work however often it is tried
    Error last_error{ErrorCode::unavailable, "not reached yet"};
    std::vector<PathReport> paths;                      // by shard rank
    std::vector<std::shared_ptr<SourceCounts>> counts;  // likewise
  };

  struct Peer;
  struct Group;

  // How this rank holds a table's pages.
  struct OwnTable {
    std::uint32_t number;
    const BufferGroup*
        group;  // of options_: one of the table's groups, for what they have in common
    std::uint32_t page_count;
    std::vector<std::uint64_t> seen;  // by page: the last pull that named it; under front_mutex_
  };

  struct ReadyPiece {
    std::uint64_t pull;
    std::uint32_t shard_rank;
    wire::Ready ready;
    TimePoint arrived;
  };

  // One life of the connection to one prefill rank: from connect to loss. It outlives its loss until
  // its endpoint has let go of all memory.
  struct Session final : ConnectionListener, EndpointListener, TransferListener {
    Session(Impl& rank_, Peer& peer_) : rank{rank_}, peer{peer_} {}
    void connection_open() noexcept override { rank.greet(*this); }
    void connection_frame(wire::MessageType type,
                          std::span<const std::byte> payload) noexcept override {
      rank.on_frame(*this, type, payload);
    }
    void connection_closed(Error error) noexcept override {
      rank.connection_lost(*this, std::move(error));
    }
    void endpoint_failed(Error error) noexcept override { rank.lose(*this, std::move(error)); }
    void transfer_done(Status status) noexcept override { rank.probed(*this, std::move(status)); }

    Impl& rank;
    Peer& peer;
    bool lost{false};
    std::unique_ptr<Connection> connection;
    std::unique_ptr<Endpoint> endpoint;
    std::optional<Geometry> geometry;  // from WELCOME on
    bool probed{false};
    PathReport path;
    std::optional<PoolView> view;         // from ASSIGN on
    std::unique_ptr<MappedPool> mapped;   // null: pieces come through slots
    std::optional<PoolView> mapped_view;  // of the peer's pages, from ASSIGN on
    std::uint64_t incarnation{0};
    std::uint64_t epoch{0};
    std::uint32_t slot_count{0};
    std::uint64_t slot_stride{0};
    TimePoint setup_deadline{};
    TimePoint ping_due{};
    std::uint64_t pings{0};
    std::unordered_set<std::uint64_t> pulls;  // with an unfinished part here
    std::size_t landings{0};                  // slots that its pieces hold
    std::deque<ReadyPiece> held;              // pieces that wait for its share of landing slots
  };

  struct Peer {
    Group* group{nullptr};
    GroupMember member;
    std::shared_ptr<SourceCounts> counts;
    std::unique_ptr<Session> session;
    bool ready{false};
    std::uint32_t failed_attempts{0};  // in a row
    std::string last_failure;
    std::uint64_t last_incarnation{0};
    EventLoop::TimerId retry{0};
  };

  struct Group {
    GroupId id{};
    GroupSpec spec;
    std::vector<std::unique_ptr<Peer>> peers;  // by shard rank
    // By shard rank, once every rank has said what it holds: that, and what it gives us.
    std::vector<Geometry> geometries;
    std::vector<std::vector<Lane>> lanes;
    std::vector<std::uint64_t> waiting;  // pulls that wait for sessions
    /// Whether rank `rank` gives us anything; not known before `lanes` is.
    [[nodiscard]] bool gives(std::size_t rank) const { return !lanes[rank].empty(); }
    [[nodiscard]] bool ready() const {
      if (lanes.empty()) return false;
      for (std::size_t rank = 0; rank < peers.size(); ++rank) {
        if (gives(rank) && !peers[rank]->ready) return false;
      }
      return true;
    }
  };

  // A pull's dealings with one rank. One that gives nothing has no session and is done from the start.
  struct Part {
    Session* session{nullptr};
    // Of each table of the session's plan; the units from the first piece on, which tells the base.
    struct Tokens {
      const TransferPlan::Table* table;
      UnitList units;
      Coverage coverage;
    };
    std::vector<Tokens> tables;
    struct ReadPiece {
      std::uint32_t slot;
      std::uint64_t generation;
      std::uint64_t payload_bytes;
    };
    std::vector<ReadPiece> pieces;  // announced, by number
    std::uint32_t unreleased{0};
    std::uint64_t landed{0};  // pieces whose bytes are in our pages
    bool last{false};
    bool committed{false};
    bool heard{false};  // its first READY is here
    std::vector<std::byte> side_data;
    SourceTiming timing;

    [[nodiscard]] bool complete() const noexcept { return last && landed == pieces.size(); }
  };

  struct Pull {
    enum class State : std::uint8_t { connecting, pulling, committing, failing };

    std::uint64_t id{0};
    RoomId room{};
    Group* group{nullptr};
    // Where a table's pages go. What is said by the prefill ranks must be the same from all.
    struct Table {
      const OwnTable* own;
      std::vector<LocalPage> pages;
      std::uint64_t first_page{0};  // number of pages[0] among the rank's pages of the request
      std::uint32_t phase{0};
      std::uint64_t first_token{0}, end_token{0};
      std::optional<std::uint32_t> base;         // of the prefill chain
      std::optional<std::uint64_t> prefill_end;  // tokens
    };
    std::vector<Table> tables;
    EventHandle after{nullptr};
    TimePoint started{}, deadline{};
    TimePoint queued{}, sent{},
        complete{};  // reached the progress thread; was sent; has all its bytes
    PullListener* listener{nullptr};
    std::unique_ptr<StreamGate> gate;  // holds the engine's stream back
    State state{State::connecting};
    Status status;
    TransferPath path{TransferPath::automatic};
    std::vector<Part> parts;
    std::uint32_t scatters{0};  // copies into our pages that run now

    template <typename Self>
    static auto* find(Self& pull, std::uint32_t number) noexcept {
      const auto found = std::ranges::find(pull.tables, number,
                                           [](const Table& table) { return table.own->number; });
      return found == pull.tables.end() ? nullptr : &*found;
    }
    [[nodiscard]] Table* find_table(std::uint32_t number) noexcept { return find(*this, number); }
    [[nodiscard]] const Table* find_table(std::uint32_t number) const noexcept {
      return find(*this, number);
    }
  };

  // A landing slot: free > fetching > scattering > free. A fetch whose pull failed meanwhile keeps its
  // slot, quarantined, until the transport lets go of it.
  struct Landing final : TransferListener, CopyListener {
    Landing(Impl& rank_, std::uint32_t index_, std::byte* memory_)
        : rank{rank_}, index{index_}, memory{memory_} {}
    void transfer_done(Status status) noexcept override { rank.fetched(*this, std::move(status)); }
    void copy_done(Status status) noexcept override { rank.scattered(*this, std::move(status)); }

    enum class State : std::uint8_t { free, fetching, scattering };
    Impl& rank;
    std::uint32_t index;
    std::byte* memory;
    State state{State::free};
    std::uint64_t pull{0};  // 0: quarantined
    std::uint32_t shard_rank{0};
    Session* session{nullptr};
    wire::Ready ready;
    TimePoint started{}, landed{};  // the fetch; the fetch's end
    Duration waited{};
  };

  // Groups and sessions.
  void add_group(GroupId id, const GroupSpec& spec,
                 std::span<const std::shared_ptr<SourceCounts>> counts);
  void remove_group(GroupId id);
  void open_session(Peer& peer);
  void greet(Session& session);
  void on_frame(Session& session, wire::MessageType type,
                std::span<const std::byte> payload) noexcept;
  template <typename Message>
  void dispatch(Session& session, std::span<const std::byte> payload,
                void (Impl::*handler)(Session&, Message&));
  void on_welcome(Session& session, wire::Welcome& welcome);
  Status check_welcome(const Session& session, const wire::Welcome& welcome) const;
  Status map(Session& session, const wire::Welcome& welcome);
  void probed(Session& session, Status status) noexcept;
  void settled(Session& session);
  void assign(Group& group, Session& session);
  void begin(Session& session);
  void lose(Session& session, Error error) noexcept;
  void retire(std::unique_ptr<Session> session);
  void drop_retired() noexcept;
  void refuse(Session& session, Error error);
  void on_bye(Session& session, wire::Bye& bye);
  void connection_lost(Session& session, Error error) noexcept;

  // Pulls.
  Status place(Pull& pull, const PullPages& pages) KVSHARD_REQUIRES(front_mutex_);
  void start_pull(std::shared_ptr<Pull> pull);
  void send_pulls(Pull& pull);
  void on_ready(Session& session, wire::Ready& ready);
  Result<Part::Tokens*> tokens_of(const Session& session, Pull& pull, Part& part,
                                  const TransferPlan::Table& table, std::uint32_t base);
  static Piece piece_of(const wire::Ready& ready, const Part::Tokens& tokens, const Pull& pull);
  Status take_piece(Session& session, Pull& pull, Part& part, const wire::Ready& ready);
  Status check_mapped(const Session& session, const Part::Tokens& tokens,
                      const wire::Ready& ready) const;
  Status take_last(Session& session, Pull& pull, Part& part, wire::Ready& ready);
  void on_verdict(Session& session, wire::Verdict& verdict);
  void on_abort(Session& session, wire::Abort& abort);
  void commit_if_complete(Pull& pull);
  void fail(Pull& pull, Error error);
  void finish_if_committed(Pull& pull);
  void finish_if_idle(Pull& pull);
  void finish(Pull& pull);
  void record_end(const Pull& pull, const PullEvent& event, TimePoint ended);
  void record_wire(const Landing& landing, Pull& pull);
  [[nodiscard]] static Span piece_span(Stage stage, const Landing& landing, const Pull& pull);
  Pull* find_pull(std::uint64_t id) noexcept {
    const auto found = pulls_.find(id);
    return found == pulls_.end() ? nullptr : found->second.get();
  }

  // Landing slots.
  void pump();
  void fetched(Landing& landing, Status status) noexcept;
  void scattered(Landing& landing, Status status) noexcept;
  void release(const Landing& landing, Pull& pull);
  void land(Landing& landing, Pull& pull);
  void free_landing(Landing& landing);
  [[nodiscard]] std::size_t landing_share() const noexcept;

  void sweep();
  void excuse(Duration pause);
  void begin_close();
  void finish_close();

  template <typename Fn>
  void post(Fn fn) {
    thread_->loop().post(std::move(fn));
  }
  [[nodiscard]] TimePoint now() const noexcept { return thread_->loop().now(); }

  const DecodeOptions options_;
  std::deque<OwnTable> own_tables_;  // set by start()
  const Clock& clock_;
  const std::uint64_t incarnation_;
  std::uint64_t landing_stride_{0};

  mutable Mutex front_mutex_;
  std::condition_variable_any front_changed_;
  std::unordered_map<std::uint64_t, FrontGroup> front_groups_ KVSHARD_GUARDED_BY(front_mutex_);
  std::uint64_t next_group_ KVSHARD_GUARDED_BY(front_mutex_){1};
  std::uint64_t next_pull_ KVSHARD_GUARDED_BY(front_mutex_){1};
  std::uint64_t live_pulls_ KVSHARD_GUARDED_BY(front_mutex_){0};
  bool closing_ KVSHARD_GUARDED_BY(front_mutex_){false};
  bool closed_ KVSHARD_GUARDED_BY(front_mutex_){false};
  EventQueue<PullEvent> events_;
  mutable DecodeStats stats_;
  // Of DecodeMetrics.
  struct Counts {
    EndCounts pulls{};
    PathCounts sessions{}, bytes{};
    std::uint64_t fragments{0}, not_mapped{0}, emulated{0}, landing_bytes{0};
  };
  mutable Counts counts_;
  Recorder recorder_;

  std::unique_ptr<StagingMemory> landing_memory_;
  std::optional<Authority> authority_;  // set by start(), then constant but for its secrets()
  std::unique_ptr<ProgressThread> thread_;
  std::unique_ptr<RegisteredMemory> landing_registered_;
  std::span<std::byte> probe_memory_;
  std::deque<Landing> landings_;
  std::vector<std::uint32_t> free_landings_;
  std::vector<std::unique_ptr<Session>> retired_;  // lost; what they started still runs
  std::unordered_map<std::uint64_t, std::unique_ptr<Group>> groups_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Pull>> pulls_;
  std::deque<ReadyPiece> ready_;  // announced, waiting for a landing slot
  PoolView::Selection selection_, source_selection_;
  std::size_t ready_sessions_{0};
  std::uint64_t jitter_{random_id()};
  TimePoint swept_{};  // when sweep() last ran
  TimePoint close_deadline_{};
  bool draining_{false};
};

}  // namespace kvshard
