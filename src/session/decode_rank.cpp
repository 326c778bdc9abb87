#include "kvshard/decode_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/assert.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/random.hpp"
#include "base/try.hpp"
#include "control/connection.hpp"
#include "session/event_queue.hpp"
#include "session/pool_view.hpp"
#include "session/progress_thread.hpp"
#include "session/time_limits.hpp"
#include "wire/codec.hpp"
#include "wire/messages.hpp"

namespace kvshard {
namespace {

constexpr std::chrono::milliseconds kCloseDeadline{2'000};
constexpr std::uint64_t kMaxProbeBytes = 1U << 20;

// Trying again cannot help before somebody changes a configuration.
bool is_permanent(ErrorCode code) noexcept {
  return code == ErrorCode::failed_precondition || code == ErrorCode::invalid_argument ||
         code == ErrorCode::unsupported;
}

}  // namespace

// All state but front_* and events_ is used on the progress thread only.
class DecodeRank::Impl {
 public:
  Impl(DecodeOptions options, PoolView view, const Clock& clock)
      : options_{std::move(options)},
        whole_view_{std::move(view)},
        clock_{clock},
        incarnation_{random_id()} {}
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
  void close() noexcept;

 private:
  struct FrontGroup {
    GroupSpec spec;
    std::uint32_t waiters{0};
    bool ready{false};             // all sessions are up, now or once
    std::optional<Error> refused;  // will not work however often it is tried
    Error last_error{ErrorCode::unavailable, "not reached yet"};
    std::vector<PathReport> paths;  // by shard rank
  };

  struct Peer;
  struct Group;

  struct ReadyPiece {
    std::uint64_t pull;
    std::uint32_t shard_rank;
    wire::Ready ready;
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
    void connection_closed(Error error) noexcept override { rank.lose(*this, std::move(error)); }
    void endpoint_failed(Error error) noexcept override { rank.lose(*this, std::move(error)); }
    void transfer_done(Status status) noexcept override { rank.probed(*this, std::move(status)); }

    Impl& rank;
    Peer& peer;
    bool lost{false};
    std::unique_ptr<Connection> connection;
    std::unique_ptr<Endpoint> endpoint;
    std::optional<PoolView> view;
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
    std::vector<std::uint64_t> waiting;        // pulls that wait for sessions
    [[nodiscard]] bool ready() const {
      return std::all_of(peers.begin(), peers.end(), [](const auto& peer) { return peer->ready; });
    }
  };

  // A pull's dealings with one rank.
  struct Part {
    Session* session{nullptr};
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
    std::vector<std::byte> side_data;
    SourceTiming timing;

    [[nodiscard]] bool complete() const noexcept { return last && landed == pieces.size(); }
  };

  struct Pull {
    enum class State : std::uint8_t { connecting, pulling, committing, failing };

    std::uint64_t id{0};
    RoomId room{};
    Group* group{nullptr};
    std::vector<LocalPage> pages;  // of positions first, first + 1, ...
    std::uint32_t first{0};
    EventHandle after{nullptr};
    TimePoint started{}, deadline{};
    PullListener* listener{nullptr};
    State state{State::connecting};
    Status status;
    TransferPath path{TransferPath::automatic};
    std::optional<Coverage> coverage;
    std::vector<Part> parts;
    std::uint32_t scatters{0};  // copies into our pages that run now

    [[nodiscard]] std::uint32_t end() const noexcept {
      return first + static_cast<std::uint32_t>(pages.size());
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
    TimePoint started{};
  };

  // Groups and sessions.
  void add_group(GroupId id, const GroupSpec& spec);
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
  void probed(Session& session, Status status) noexcept;
  void lose(Session& session, Error error) noexcept;
  void retire(std::unique_ptr<Session> session);
  void drop_retired() noexcept;
  void refuse(Session& session, Error error);
  void on_bye(Session& session, wire::Bye& bye);

  // Pulls.
  void start_pull(std::shared_ptr<Pull> pull);
  void send_pulls(Pull& pull);
  void on_ready(Session& session, wire::Ready& ready);
  Status check_ready(const Session& session, const Pull& pull, const Part& part,
                     const wire::Ready& ready) const;
  void on_verdict(Session& session, wire::Verdict& verdict);
  void on_abort(Session& session, wire::Abort& abort);
  void commit_if_complete(Pull& pull);
  void fail(Pull& pull, Error error);
  void finish_if_idle(Pull& pull);
  void finish(Pull& pull);
  Pull* find_pull(std::uint64_t id) noexcept {
    const auto found = pulls_.find(id);
    return found == pulls_.end() ? nullptr : found->second.get();
  }

  // Landing slots.
  void pump();
  void fetched(Landing& landing, Status status) noexcept;
  void scattered(Landing& landing, Status status) noexcept;
  void free_landing(Landing& landing);
  [[nodiscard]] std::size_t landing_share() const noexcept;

  void sweep();
  void begin_close();
  void finish_close();

  template <typename Fn>
  void post(Fn fn) {
    thread_->loop().post(std::move(fn));
  }
  [[nodiscard]] TimePoint now() const noexcept { return thread_->loop().now(); }

  const DecodeOptions options_;
  const PoolView whole_view_;
  const Clock& clock_;
  const std::uint64_t incarnation_;
  std::uint64_t landing_stride_{0};

  mutable Mutex front_mutex_;
  std::condition_variable_any front_changed_;
  std::unordered_map<std::uint64_t, FrontGroup> front_groups_ KVSHARD_GUARDED_BY(front_mutex_);
  std::uint64_t next_group_ KVSHARD_GUARDED_BY(front_mutex_){1};
  std::uint64_t next_pull_ KVSHARD_GUARDED_BY(front_mutex_){1};
  std::uint64_t live_pulls_ KVSHARD_GUARDED_BY(front_mutex_){0};
  std::vector<std::uint64_t> page_seen_
      KVSHARD_GUARDED_BY(front_mutex_);  // by page: last pull that named it
  bool closing_ KVSHARD_GUARDED_BY(front_mutex_){false};
  bool closed_ KVSHARD_GUARDED_BY(front_mutex_){false};
  EventQueue<PullEvent> events_;
  mutable DecodeStats stats_;

  std::unique_ptr<StagingMemory> landing_memory_;
  std::unique_ptr<ProgressThread> thread_;
  std::unique_ptr<RegisteredMemory> landing_registered_;
  std::span<std::byte> probe_memory_;
  std::deque<Landing> landings_;
  std::vector<std::uint32_t> free_landings_;
  std::vector<std::unique_ptr<Session>> retired_;  // lost; what they started still runs
  std::unordered_map<std::uint64_t, std::unique_ptr<Group>> groups_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Pull>> pulls_;
  std::deque<ReadyPiece> ready_;  // announced, waiting for a landing slot
  PoolView::Selection selection_;
  std::vector<LocalPage> pages_;
  std::size_t ready_sessions_{0};
  std::uint64_t jitter_{random_id()};
  TimePoint swept_{};  // when sweep() last ran
  TimePoint close_deadline_{};
  bool draining_{false};
};

// ---- set-up ----------------------------------------------------------------------------------------

Result<std::unique_ptr<DecodeRank>> DecodeRank::create(DecodeOptions options,
                                                       std::unique_ptr<Transport> transport,
                                                       std::unique_ptr<CopyEngine> engine,
                                                       const Clock* clock) {
  if (transport == nullptr || engine == nullptr)
    return Error{ErrorCode::invalid_argument, "a transport and a copy engine are required"};
  KVSHARD_TRY(validate(options.pool));
  KVSHARD_TRY(check_times({{"heartbeat", options.heartbeat},
                           {"peer_timeout", options.peer_timeout},
                           {"fetch_timeout", options.fetch_timeout},
                           {"reconnect_min", options.reconnect_min},
                           {"reconnect_max", options.reconnect_max}},
                          options.heartbeat, options.peer_timeout));
  if (options.landing_slots == 0 || options.window == 0) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("landing_slots {} and window {} must not be 0", options.landing_slots,
                             options.window)};
  }
  PoolView view{options.pool, options.pool.geometry, options.pool.geometry};
  auto impl = std::make_unique<Impl>(std::move(options), std::move(view),
                                     clock != nullptr ? *clock : SteadyClock::instance());
  KVSHARD_TRY(impl->start(std::move(transport), std::move(engine)));
  return std::unique_ptr<DecodeRank>{new DecodeRank{std::move(impl)}};
}

Status DecodeRank::Impl::start(std::unique_ptr<Transport> transport,
                               std::unique_ptr<CopyEngine> engine) {
  KVSHARD_TRY(events_.open());
  page_seen_.resize(whole_view_.page_count());
  landing_stride_ = (slot_bytes_for(options_.landing_payload_bytes) + 4095) / 4096 * 4096;
  // One slot more, for probes: what they read is thrown away.
  KVSHARD_TRY(landing_memory_, make_staging_memory(engine->memory_kind(), engine->device(),
                                                   landing_stride_ * (options_.landing_slots + 1)));
  KVSHARD_TRY(thread_, ProgressThread::create(std::move(transport), std::move(engine), clock_));
  KVSHARD_TRY(landing_registered_, thread_->transport().register_memory(landing_memory_->bytes(),
                                                                        landing_memory_->kind()));
  for (std::uint32_t i = 0; i < options_.landing_slots; ++i) {
    landings_.emplace_back(*this, i, landing_memory_->bytes().data() + i * landing_stride_);
    free_landings_.push_back(i);
  }
  probe_memory_ = landing_memory_->bytes().subspan(options_.landing_slots * landing_stride_,
                                                   std::min(landing_stride_, kMaxProbeBytes));
  thread_->loop().post([this] {
    swept_ = now();
    sweep();
  });
  thread_->start();
  return {};
}

DecodeRank::Impl::~Impl() {
  close();
  if (retired_.empty()) return;
  // The transport would not let go of landing memory in time, and may still write to it. Memory that
  // is never freed is the only safe kind; close() has logged it.
  struct Abandoned {
    std::vector<std::unique_ptr<Session>> sessions;
    std::unique_ptr<RegisteredMemory> registered;
    std::unique_ptr<ProgressThread> thread;
    std::unique_ptr<StagingMemory> memory;
  };
  static Mutex mutex;
  static auto* const abandoned = new std::vector<Abandoned>;  // never destroyed
  const MutexLock lock{mutex};
  abandoned->push_back({std::move(retired_), std::move(landing_registered_), std::move(thread_),
                        std::move(landing_memory_)});
}

// ---- public calls: check, then post ----------------------------------------------------------------

Result<GroupId> DecodeRank::Impl::connect(const GroupSpec& spec,
                                          std::chrono::milliseconds deadline) {
  KVSHARD_TRY(validate(spec));
  for (const GroupMember& member : spec.members)
    KVSHARD_TRY(SocketAddress::parse(member.host, member.port));
  const auto until = std::chrono::steady_clock::now() + bounded(deadline);

  std::unique_lock lock{front_mutex_};
  if (closing_) return Error{ErrorCode::failed_precondition, "the rank is closed"};
  auto found = std::find_if(front_groups_.begin(), front_groups_.end(),
                            [&](const auto& entry) { return entry.second.spec == spec; });
  if (found == front_groups_.end()) {
    found = front_groups_.try_emplace(next_group_++).first;
    found->second.spec = spec;
    found->second.paths.resize(spec.members.size());
    post([this, id = GroupId{found->first}, spec] { add_group(id, spec); });
  }
  const std::uint64_t id = found->first;
  FrontGroup& group = found->second;
  ++group.waiters;  // nobody erases the entry while it is above 0
  const bool in_time = front_changed_.wait_until(
      lock, until, [&] { return group.ready || group.refused || closing_; });
  --group.waiters;
  if (group.ready && !group.refused) return GroupId{id};
  Error error = group.refused ? *group.refused
                : !in_time    ? Error{ErrorCode::deadline_exceeded,
                                   fmt::format("group {} not connected within {} ms: {}", spec.name,
                                                  deadline.count(), group.last_error.message)}
                              : Error{ErrorCode::failed_precondition, "the rank is closed"};
  if (group.waiters == 0 && !group.ready) {  // nobody is left who wants it
    front_groups_.erase(id);
    post([this, id] { remove_group(GroupId{id}); });
  }
  return error;
}

void DecodeRank::Impl::disconnect(GroupId group) {
  const MutexLock lock{front_mutex_};
  const auto found = front_groups_.find(static_cast<std::uint64_t>(group));
  if (found == front_groups_.end() || found->second.waiters > 0) return;
  front_groups_.erase(found);
  post([this, group] { remove_group(group); });
}

Result<PathReport> DecodeRank::Impl::path(GroupId group, std::uint32_t shard_rank) const {
  const MutexLock lock{front_mutex_};
  const auto found = front_groups_.find(static_cast<std::uint64_t>(group));
  if (found == front_groups_.end() || shard_rank >= found->second.paths.size()) {
    return Error{ErrorCode::invalid_argument, fmt::format("no rank {} of group {}", shard_rank,
                                                          static_cast<std::uint64_t>(group))};
  }
  return found->second.paths[shard_rank];
}

Result<PullId> DecodeRank::Impl::pull(const PullRequest& request) {
  if (request.pages.size() > std::numeric_limits<std::uint32_t>::max() - request.first_position)
    return Error{ErrorCode::invalid_argument, "positions beyond 2^32"};
  if (request.after != nullptr && thread_->engine().memory_kind() != MemoryKind::cuda)
    return Error{ErrorCode::unsupported, "an event to wait for needs the CUDA copy engine"};
  auto pull = std::make_shared<Pull>();
  pull->room = request.room;
  pull->pages.assign(request.pages.begin(), request.pages.end());
  pull->first = request.first_position;
  pull->after = request.after;
  pull->listener = request.listener;
  pull->started = clock_.now();
  pull->deadline = pull->started + bounded(request.deadline);

  const MutexLock lock{front_mutex_};
  if (closing_) return Error{ErrorCode::failed_precondition, "the rank is closed"};
  if (!front_groups_.contains(static_cast<std::uint64_t>(request.group))) {
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("group {} is not connected", static_cast<std::uint64_t>(request.group))};
  }
  if (live_pulls_ >= options_.max_pulls) {
    return Error{ErrorCode::resource_exhausted, fmt::format("{} pulls are running, max_pulls is {}",
                                                            live_pulls_, options_.max_pulls)};
  }
  pull->id = next_pull_++;
  for (std::size_t i = 0; i < pull->pages.size(); ++i) {
    const std::uint32_t page = index(pull->pages[i]);
    if (page == 0 || page >= page_seen_.size() || page_seen_[page] == pull->id) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("destination page {} at position {} is {}", page, pull->first + i,
                      page == 0                   ? "padding"
                      : page >= page_seen_.size() ? fmt::format("not below {}", page_seen_.size())
                                                  : "named twice")};
    }
    page_seen_[page] = pull->id;
  }
  ++live_pulls_;
  counters::add(stats_.pulls_started);
  counters::add(stats_.pulls);
  const PullId id{pull->id};
  post([this, group = request.group, pull = std::move(pull)] {
    const auto found = groups_.find(static_cast<std::uint64_t>(group));
    pull->group = found == groups_.end() ? nullptr : found->second.get();
    start_pull(pull);
  });
  return id;
}

void DecodeRank::Impl::cancel(PullId pull) {
  post([this, id = static_cast<std::uint64_t>(pull)] {
    if (Pull* found = find_pull(id))
      fail(*found, Error{ErrorCode::cancelled, "cancelled by the decode rank"});
  });
}

// ---- groups and sessions ---------------------------------------------------------------------------

void DecodeRank::Impl::add_group(GroupId id, const GroupSpec& spec) {
  auto group = std::make_unique<Group>();
  group->id = id;
  group->spec = spec;
  group->peers.resize(spec.members.size());
  for (const GroupMember& member : spec.members) {
    auto peer = std::make_unique<Peer>();
    peer->group = group.get();
    peer->member = member;
    group->peers[member.shard_rank] = std::move(peer);
  }
  Group& made = *groups_.emplace(static_cast<std::uint64_t>(id), std::move(group)).first->second;
  for (auto& peer : made.peers) open_session(*peer);
}

void DecodeRank::Impl::remove_group(GroupId id) {
  const auto found = groups_.find(static_cast<std::uint64_t>(id));
  if (found == groups_.end()) return;
  Group& group = *found->second;
  std::vector<std::uint64_t> pulls;
  for (const auto& [pull_id, pull] : pulls_) {
    if (pull->group == &group) pulls.push_back(pull_id);
  }
  for (const std::uint64_t pull : pulls) {
    if (Pull* live = find_pull(pull)) {
      fail(*live, Error{ErrorCode::cancelled, "the group was disconnected"});
      if (Pull* still = find_pull(pull)) still->group = nullptr;  // its last copies run on
    }
  }
  for (auto& peer : group.peers) {
    thread_->loop().cancel(peer->retry);
    if (peer->session == nullptr) continue;
    if (peer->session->connection != nullptr) {
      (void)peer->session->connection->send(
          wire::Bye{Error{ErrorCode::cancelled, "the decode rank disconnects"}});
      peer->session->connection->flush_and_close();
    }
    if (peer->ready) {
      --ready_sessions_;
      counters::subtract(stats_.peers);
    }
    peer->session->lost = true;
    retire(std::move(peer->session));
  }
  groups_.erase(found);  // a lost session does not look at its peer
}

void DecodeRank::Impl::open_session(Peer& peer) {
  peer.retry = 0;
  peer.session = std::make_unique<Session>(*this, peer);
  Session& session = *peer.session;
  session.setup_deadline = now() + 2 * options_.peer_timeout;
  session.ping_due = now() + options_.heartbeat;
  const auto address =
      SocketAddress::parse(peer.member.host, peer.member.port);  // checked by connect()
  auto connection =
      Connection::connect(thread_->loop(), *address, now() + options_.peer_timeout, session);
  if (!connection) return lose(session, std::move(connection).error());
  session.connection = std::move(connection).value();
}

void DecodeRank::Impl::greet(Session& session) {
  const Peer& peer = session.peer;
  (void)session.connection->send(
      wire::Hello{.version_min = wire::kProtocolVersion,
                  .version_max = wire::kProtocolVersion,
                  .incarnation = incarnation_,
                  .group = peer.group->spec.name,
                  .epoch = peer.group->spec.epoch,
                  .shard_rank = peer.member.shard_rank,
                  .shard_size = static_cast<std::uint32_t>(peer.group->peers.size()),
                  .transport = std::string{thread_->transport().kind()},
                  .geometry = options_.pool.geometry,
                  .landing_payload_bytes = options_.landing_payload_bytes,
                  .heartbeat_ms = static_cast<std::uint32_t>(options_.heartbeat.count())});
}

template <typename Message>
void DecodeRank::Impl::dispatch(Session& session, std::span<const std::byte> payload,
                                void (Impl::*handler)(Session&, Message&)) {
  auto message = wire::decode<Message>(payload);
  if (!message) return refuse(session, std::move(message).error());
  (this->*handler)(session, *message);
}

void DecodeRank::Impl::on_frame(Session& session, wire::MessageType type,
                                std::span<const std::byte> payload) noexcept {
  using wire::MessageType;
  if (session.lost) return;
  switch (type) {
    case MessageType::ping:
      return;  // any byte is a sign of life
    case MessageType::bye:
      return dispatch<wire::Bye>(session, payload, &Impl::on_bye);
    case MessageType::welcome:
      if (session.endpoint == nullptr)
        return dispatch<wire::Welcome>(session, payload, &Impl::on_welcome);
      break;
    case MessageType::ready:
      if (session.peer.ready) return dispatch<wire::Ready>(session, payload, &Impl::on_ready);
      break;
    case MessageType::verdict:
      if (session.peer.ready) return dispatch<wire::Verdict>(session, payload, &Impl::on_verdict);
      break;
    case MessageType::abort:
      if (session.peer.ready) return dispatch<wire::Abort>(session, payload, &Impl::on_abort);
      break;
    default:
      break;
  }
  refuse(session,
         Error{ErrorCode::failed_precondition,
               fmt::format("message type {} is not expected now", static_cast<int>(type))});
}

Status DecodeRank::Impl::check_welcome(const Session& session, const wire::Welcome& welcome) const {
  const Peer& peer = session.peer;
  const auto differs = [](std::string_view field, const auto& want, const auto& have) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("{}: decode wants {}, prefill has {}", field, want, have)};
  };
  if (welcome.version != wire::kProtocolVersion)
    return differs("protocol version", wire::kProtocolVersion, welcome.version);
  if (welcome.shard_rank != peer.member.shard_rank)
    return differs("shard_rank", peer.member.shard_rank, welcome.shard_rank);
  if (welcome.shard_size != peer.group->peers.size())
    return differs("shard_size", peer.group->peers.size(), welcome.shard_size);
  if (const std::uint64_t epoch = peer.group->spec.epoch; epoch != 0 && epoch != welcome.epoch)
    return differs("epoch", epoch, welcome.epoch);
  // Another process at the same address holds other pages, whatever they are called.
  if (peer.member.incarnation != 0 && peer.member.incarnation != welcome.incarnation)
    return differs("incarnation", peer.member.incarnation, welcome.incarnation);
  if (welcome.heartbeat_ms >= static_cast<std::uint64_t>(options_.peer_timeout.count())) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("heartbeat_ms: prefill sends one each {} ms, decode waits {} ms",
                             welcome.heartbeat_ms, options_.peer_timeout.count())};
  }
  if (welcome.slot_count == 0 || welcome.slot_stride < slot_bytes_for(1)) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("{} slots, {} bytes apart", welcome.slot_count, welcome.slot_stride)};
  }
  KVSHARD_TRY(validate(welcome.geometry));
  return check_compatible(welcome.geometry, options_.pool.geometry);
}

void DecodeRank::Impl::on_welcome(Session& session, wire::Welcome& welcome) {
  if (Status fits = check_welcome(session, welcome); !fits)
    return refuse(session, std::move(fits).error());
  session.view.emplace(options_.pool, welcome.geometry, options_.pool.geometry);
  session.incarnation = welcome.incarnation;
  session.epoch = welcome.epoch;
  session.slot_count = welcome.slot_count;
  session.slot_stride = welcome.slot_stride;
  auto endpoint = thread_->transport().connect(welcome.transport_address, welcome.staging, session);
  if (!endpoint) return refuse(session, std::move(endpoint).error());
  session.endpoint = std::move(endpoint).value();
  if (Status started = session.endpoint->probe(probe_memory_, session); !started)
    refuse(session, std::move(started).error());
}

void DecodeRank::Impl::probed(Session& session, Status status) noexcept {
  if (session.lost) return;
  if (!status) {
    // A path that the options refuse stays refused; anything else may work next time.
    if (status.error().code == ErrorCode::unsupported)
      return refuse(session, std::move(status).error());
    return lose(session, std::move(status).error());
  }
  Peer& peer = session.peer;
  Group& group = *peer.group;
  if (peer.last_incarnation != 0) counters::add(stats_.reconnects);
  peer.last_incarnation = session.incarnation;
  peer.failed_attempts = 0;
  peer.ready = true;
  ++ready_sessions_;
  counters::add(stats_.peers);
  const PathReport& report = session.endpoint->path();
  log::info("connected: group {} epoch {} shard {} at {}: path {}: {}", group.spec.name,
            group.spec.epoch, peer.member.shard_rank, session.connection->peer(),
            to_string(report.path), report.reason);
  {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(group.id));
        found != front_groups_.end()) {
      found->second.paths[peer.member.shard_rank] = report;
      if (group.ready()) {
        found->second.ready = true;
        found->second.refused.reset();
      }
    }
    front_changed_.notify_all();
  }
  if (!group.ready()) return;
  for (const std::uint64_t id : std::exchange(group.waiting, {})) {
    if (Pull* pull = find_pull(id); pull != nullptr && pull->state == Pull::State::connecting)
      send_pulls(*pull);
  }
}

// The one way in which a session ends on its own: every kind of failure comes here.
void DecodeRank::Impl::lose(Session& session, Error error) noexcept {
  if (session.lost) return;
  session.lost = true;
  Peer& peer = session.peer;
  Group& group = *peer.group;
  const std::string message = fmt::format(
      "prefill rank {} of group {} (epoch {}, incarnation {:016x}) lost: {}",
      peer.member.shard_rank, group.spec.name,
      session.epoch != 0 ? session.epoch : group.spec.epoch, session.incarnation, error.message);
  peer.last_failure = error.message;
  if (peer.ready) {
    peer.ready = false;
    --ready_sessions_;
    counters::subtract(stats_.peers);
    counters::add(stats_.peers_lost);
    log::info("peer lost: shard {}, {} pulls: {}", peer.member.shard_rank, session.pulls.size(),
              error.message);
  } else {
    ++peer.failed_attempts;
  }
  for (const std::uint64_t id :
       std::vector<std::uint64_t>{session.pulls.begin(), session.pulls.end()}) {
    if (Pull* pull = find_pull(id)) fail(*pull, Error{ErrorCode::unavailable, message});
  }
  if (peer.failed_attempts > 0) {  // more than a blip: whoever waits should choose another group
    for (const std::uint64_t id : std::exchange(group.waiting, {})) {
      if (Pull* pull = find_pull(id)) fail(*pull, Error{ErrorCode::unavailable, message});
    }
  }
  if (session.connection != nullptr) session.connection->close();
  retire(std::move(peer.session));
  {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(group.id));
        found != front_groups_.end())
      found->second.last_error = Error{error.code, message};
  }
  if (draining_) return;
  // Doubling back-off with jitter in [1/2, 1], so that a restarted rank is not stormed.
  const auto shift = std::min<std::uint32_t>(peer.failed_attempts, 16);
  const auto ceiling =
      std::min<Duration>(options_.reconnect_max, Duration{options_.reconnect_min} * (1U << shift));
  jitter_ = jitter_ * 6364136223846793005U + 1442695040888963407U;
  const auto delay = ceiling / 2 + ceiling * static_cast<std::int64_t>(jitter_ >> 48) / (2 * 65536);
  peer.retry = thread_->loop().at(now() + delay, [this, &peer] { open_session(peer); });
}

void DecodeRank::Impl::retire(std::unique_ptr<Session> session) {
  if (session->endpoint != nullptr) session->endpoint->close();
  retired_.push_back(std::move(session));  // the sweep destroys it once nothing of it runs
}

void DecodeRank::Impl::drop_retired() noexcept {
  std::erase_if(retired_, [](const auto& session) {
    return session->landings == 0 && (session->endpoint == nullptr || session->endpoint->closed());
  });
}

// Says why before it closes. The peer's or our own configuration has to change before this can work.
void DecodeRank::Impl::refuse(Session& session, Error error) {
  (void)session.connection->send(wire::Bye{error});
  session.connection->flush_and_close();
  if (!session.peer.ready && is_permanent(error.code)) {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(session.peer.group->id));
        found != front_groups_.end()) {
      found->second.refused = error;
    }
    front_changed_.notify_all();
  }
  log::warning("prefill rank {} refused: {}", session.peer.member.shard_rank, error.message);
  lose(session, std::move(error));
}

void DecodeRank::Impl::on_bye(Session& session, wire::Bye& bye) {
  if (!session.peer.ready && is_permanent(bye.error.code)) {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(session.peer.group->id));
        found != front_groups_.end()) {
      found->second.refused = bye.error;
    }
    front_changed_.notify_all();
  }
  lose(session, std::move(bye.error));
}

// ---- pulls -----------------------------------------------------------------------------------------

void DecodeRank::Impl::start_pull(std::shared_ptr<Pull> made) {
  Pull& pull = *made;
  pulls_.emplace(pull.id, std::move(made));
  if (draining_ || pull.group == nullptr)
    return fail(pull, Error{ErrorCode::unavailable, "the group is not connected any more"});
  Group& group = *pull.group;
  if (group.ready()) return send_pulls(pull);
  for (const auto& peer : group.peers) {
    if (peer->ready || peer->failed_attempts == 0) continue;
    return fail(pull,
                Error{ErrorCode::unavailable,
                      fmt::format("prefill rank {} of group {} was not reached in {} attempts: {}",
                                  peer->member.shard_rank, group.spec.name, peer->failed_attempts,
                                  peer->last_failure)});
  }
  group.waiting.push_back(pull.id);
}

void DecodeRank::Impl::send_pulls(Pull& pull) {
  pull.state = Pull::State::pulling;
  pull.coverage.emplace(static_cast<std::uint32_t>(pull.pages.size()), whole_view_.buffers());
  pull.parts.resize(pull.group->peers.size());
  pull.path = pull.group->peers.front()->session->endpoint->path().path;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(pull.deadline - now()).count();
  for (std::uint32_t rank = 0; rank < pull.parts.size(); ++rank) {
    Session& session = *pull.group->peers[rank]->session;
    pull.parts[rank].session = &session;
    pull.parts[rank].timing.shard_rank = rank;
    session.pulls.insert(pull.id);
    (void)session.connection->send(
        wire::Pull{.pull = pull.id,
                   .room = pull.room,
                   .first_position = pull.first,
                   .end_position = pull.end(),
                   .window = options_.window,
                   .wait_ms = static_cast<std::uint32_t>(std::clamp<std::int64_t>(
                       left, 0, std::numeric_limits<std::uint32_t>::max()))});
  }
}

Status DecodeRank::Impl::check_ready(const Session& session, const Pull& pull, const Part& part,
                                     const wire::Ready& ready) const {
  const auto bad = [&](std::string what) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("READY of pull {}: {}", ready.pull, what)};
  };
  if (part.last) return bad("a piece after the last");
  if (ready.piece != part.pieces.size())
    return bad(fmt::format("piece {}, expected {}", ready.piece, part.pieces.size()));
  if (ready.last) {
    if (ready.payload_bytes != 0 || !ready.positions.empty())
      return bad("the last message carries a payload");
    return {};
  }
  if (part.unreleased >= options_.window)
    return bad(fmt::format("more than {} slots at once", options_.window));
  if (ready.slot >= session.slot_count)
    return bad(fmt::format("slot {} of {}", ready.slot, session.slot_count));
  const std::uint32_t buffers = session.view->buffers();
  if (ready.buffer_count == 0 || ready.first_buffer >= buffers ||
      ready.buffer_count > buffers - ready.first_buffer)
    return bad(
        fmt::format("buffers [{}, +{}) of {}", ready.first_buffer, ready.buffer_count, buffers));
  std::uint64_t positions = 0;
  for (const Run& run : ready.positions) {
    const std::uint64_t last =
        run.first + std::uint64_t{run.stride} * (run.count - std::uint64_t{1});
    if (run.count == 0 || run.stride == 0 || run.first < pull.first || last >= pull.end())
      return bad(fmt::format("positions {} + {} * {} outside [{}, {})", run.first, run.stride,
                             run.count, pull.first, pull.end()));
    positions += run.count;
  }
  const std::uint64_t payload =
      positions * session.view->page_bytes(ready.first_buffer, ready.buffer_count);
  if (positions == 0 || positions > pull.pages.size() || payload != ready.payload_bytes)
    return bad(fmt::format("{} bytes for {} positions, expected {}", ready.payload_bytes, positions,
                           payload));
  if (payload > options_.landing_payload_bytes || slot_bytes_for(payload) > session.slot_stride)
    return bad(fmt::format("{} bytes do not fit the slots of {} and {}", payload,
                           options_.landing_payload_bytes, session.slot_stride));
  return {};
}

void DecodeRank::Impl::on_ready(Session& session, wire::Ready& ready) {
  Pull* const pull = find_pull(ready.pull);
  if (pull == nullptr ||
      pull->state != Pull::State::pulling) {  // it failed while this was on its way
    counters::add(stats_.late_messages);
    return;
  }
  const std::uint32_t rank = session.peer.member.shard_rank;
  if (pull->parts[rank].session != &session) {
    counters::add(stats_.late_messages);
    return;
  }
  Part& part = pull->parts[rank];
  if (Status fits = check_ready(session, *pull, part, ready); !fits)
    return refuse(session, std::move(fits).error());
  if (ready.last) {
    part.last = true;
    part.side_data = std::move(ready.side_data);
    return commit_if_complete(*pull);
  }
  for (const Run& run : ready.positions) {
    for (std::uint32_t i = 0; i < run.count; ++i) {
      const std::uint32_t position = run.first + i * run.stride;
      if (!pull->coverage->mark(position - pull->first, ready.first_buffer, ready.buffer_count)) {
        return refuse(session, Error{ErrorCode::invalid_argument,
                                     fmt::format("READY of pull {}: position {} came twice",
                                                 ready.pull, position)});
      }
    }
  }
  if (part.pieces.empty()) part.timing.first_ready = clock_.now() - pull->started;
  part.pieces.push_back({ready.slot, ready.generation, ready.payload_bytes});
  ++part.unreleased;
  ready_.push_back({pull->id, rank, std::move(ready)});
  pump();
}

// Starts fetches while there are landing slots, in the order in which pieces were announced.
void DecodeRank::Impl::pump() {
  while (!ready_.empty() && !free_landings_.empty()) {
    ReadyPiece piece = std::move(ready_.front());
    ready_.pop_front();
    Pull* const pull = find_pull(piece.pull);
    if (pull == nullptr || pull->state != Pull::State::pulling) continue;
    Session& session = *pull->parts[piece.shard_rank].session;
    if (session.landings >= landing_share()) {
      session.held.push_back(std::move(piece));
      continue;
    }
    ++session.landings;
    Landing& landing = landings_[free_landings_.back()];
    free_landings_.pop_back();
    counters::add(stats_.landing_in_use);
    landing.state = Landing::State::fetching;
    landing.pull = piece.pull;
    landing.shard_rank = piece.shard_rank;
    landing.session = &session;
    landing.ready = std::move(piece.ready);
    landing.started = clock_.now();
    const Status started = session.endpoint->fetch(
        landing.ready.slot * session.slot_stride,
        std::span{landing.memory, slot_bytes_for(landing.ready.payload_bytes)}, landing);
    if (!started) {
      free_landing(landing);
      fail(*pull, started.error());
    }
  }
}

// How many landing slots one peer may hold while there are others, so that one that hangs cannot take
// them all.
std::size_t DecodeRank::Impl::landing_share() const noexcept {
  return ready_sessions_ > 1 ? std::max<std::size_t>(1, landings_.size() / 2) : landings_.size();
}

// To be followed by pump(), which gives the slot to whoever is next.
void DecodeRank::Impl::free_landing(Landing& landing) {
  Session& session = *std::exchange(landing.session, nullptr);
  landing.state = Landing::State::free;
  landing.pull = 0;
  free_landings_.push_back(landing.index);
  counters::subtract(stats_.landing_in_use);
  --session.landings;
  for (bool found = false; !found && !session.held.empty(); session.held.pop_front()) {
    const Pull* const pull = find_pull(session.held.front().pull);
    found = pull != nullptr && pull->state == Pull::State::pulling;
    if (found) ready_.push_front(std::move(session.held.front()));
  }
}

void DecodeRank::Impl::fetched(Landing& landing, Status status) noexcept {
  Pull* const pull = landing.pull == 0 ? nullptr : find_pull(landing.pull);
  if (pull == nullptr) {
    counters::subtract(stats_.quarantined);
    free_landing(landing);
    return pump();
  }
  Session& session = *landing.session;
  if (!status) {
    free_landing(landing);
    lose(session, std::move(status).error());  // fails the pull too
    return pump();
  }
  Part& part = pull->parts[landing.shard_rank];
  part.timing.wire += clock_.now() - landing.started;
  // The peer may reuse the slot from here on: its bytes are ours. Whether they were valid is for COMMIT.
  --part.unreleased;
  (void)session.connection->send(wire::Release{.pull = pull->id,
                                               .piece = landing.ready.piece,
                                               .slot = landing.ready.slot,
                                               .generation = landing.ready.generation});
  pages_.clear();
  for (const Run& run : landing.ready.positions) {
    for (std::uint32_t i = 0; i < run.count; ++i)
      pages_.push_back(pull->pages[run.first + i * run.stride - pull->first]);
  }
  session.view->select(landing.ready.first_buffer, landing.ready.buffer_count, pages_, selection_);
  const CopyJob job{.direction = CopyJob::Direction::scatter,
                    .batches = selection_.batches,
                    .slot = landing.memory,
                    .stamp = {.lease = landing.ready.lease,
                              .generation = landing.ready.generation,
                              .chunk = landing.ready.piece,
                              .payload_bytes = landing.ready.payload_bytes},
                    .checksum = landing.ready.checksum,
                    .after = pull->after};
  landing.state = Landing::State::scattering;
  ++pull->scatters;
  if (Status taken = thread_->engine().submit(job, landing); !taken)
    scattered(landing, std::move(taken));
}

void DecodeRank::Impl::scattered(Landing& landing, Status status) noexcept {
  Pull& pull = *find_pull(landing.pull);  // it waits for its scatters
  --pull.scatters;
  if (pull.state == Pull::State::failing) {
    finish_if_idle(pull);
  } else if (!status) {
    if (status.error().code == ErrorCode::data_loss) counters::add(stats_.stale);
    fail(pull, std::move(status).error());
  } else {
    Part& part = pull.parts[landing.shard_rank];
    ++part.landed;
    ++part.timing.pieces;
    part.timing.bytes += landing.ready.payload_bytes;
    part.timing.landed = clock_.now() - pull.started;
    counters::add(stats_.pieces);
    counters::add(stats_.bytes, landing.ready.payload_bytes);
    commit_if_complete(pull);
  }
  free_landing(landing);
  pump();
}

void DecodeRank::Impl::commit_if_complete(Pull& pull) {
  if (!std::all_of(pull.parts.begin(), pull.parts.end(),
                   [](const Part& part) { return part.complete(); }))
    return;
  if (!pull.coverage->complete()) {
    return fail(
        pull,
        Error{ErrorCode::data_loss,
              fmt::format("{} (page, buffer) pairs were never sent, the first at position {}",
                          pull.coverage->missing(), pull.first + pull.coverage->first_missing())});
  }
  pull.state = Pull::State::committing;
  for (const Part& part : pull.parts) {
    wire::PieceDigest digest;
    for (std::uint64_t i = 0; i < part.pieces.size(); ++i) {
      digest.add(i, part.pieces[i].slot, part.pieces[i].generation, part.pieces[i].payload_bytes);
    }
    (void)part.session->connection->send(wire::Commit{pull.id, part.pieces.size(), digest.value()});
  }
}

void DecodeRank::Impl::on_verdict(Session& session, wire::Verdict& verdict) {
  Pull* const pull = find_pull(verdict.pull);
  const std::uint32_t rank = session.peer.member.shard_rank;
  if (pull == nullptr || pull->state != Pull::State::committing ||
      pull->parts[rank].session != &session || pull->parts[rank].committed) {
    counters::add(stats_.late_messages);
    return;
  }
  if (!verdict.valid) {
    counters::add(stats_.stale);
    return fail(*pull, Error{ErrorCode::data_loss,
                             fmt::format("prefill rank {} says the bytes did not stay valid: {}",
                                         rank, verdict.reason)});
  }
  pull->parts[rank].committed = true;
  session.pulls.erase(pull->id);
  if (std::all_of(pull->parts.begin(), pull->parts.end(),
                  [](const Part& part) { return part.committed; }))
    finish(*pull);
}

void DecodeRank::Impl::on_abort(Session& session, wire::Abort& abort) {
  Pull* const pull = find_pull(abort.pull);
  const std::uint32_t rank = session.peer.member.shard_rank;
  if (pull == nullptr || pull->state == Pull::State::failing || pull->parts.empty() ||
      pull->parts[rank].session != &session || pull->parts[rank].committed) {
    counters::add(stats_.late_messages);
    return;
  }
  session.pulls.erase(pull->id);
  pull->parts[rank].session = nullptr;  // it needs no ABORT back
  fail(*pull,
       Error{abort.error.code, fmt::format("prefill rank {}: {}", rank, abort.error.message)});
}

// Ends a pull early, from whatever state. The event comes once the last copy into its pages is over;
// fetches only touch landing slots, which stay out of use until the transport lets go of them.
void DecodeRank::Impl::fail(Pull& pull, Error error) {
  if (pull.state == Pull::State::failing) return;
  pull.state = Pull::State::failing;
  pull.status = error;
  for (Part& part : pull.parts) {
    Session* const session =
        std::exchange(part.session, nullptr);  // it may be gone before the pull is
    if (session == nullptr || part.committed) continue;
    session->pulls.erase(pull.id);
    if (!session->lost) (void)session->connection->send(wire::Abort{pull.id, error});
  }
  for (Landing& landing : landings_) {
    if (landing.state != Landing::State::fetching || landing.pull != pull.id) continue;
    landing.pull = 0;
    counters::add(stats_.quarantined);
  }
  finish_if_idle(pull);
}

void DecodeRank::Impl::finish_if_idle(Pull& pull) {
  if (pull.scatters == 0) finish(pull);
}

void DecodeRank::Impl::finish(Pull& pull) {
  PullEvent event{.pull = PullId{pull.id},
                  .room = pull.room,
                  .status = std::move(pull.status),
                  .total = clock_.now() - pull.started,
                  .path = pull.path};
  for (Part& part : pull.parts) {
    event.bytes += part.timing.bytes;
    if (event.status && !part.side_data.empty())
      event.side_data.push_back({part.timing.shard_rank, std::move(part.side_data)});
    event.sources.push_back(part.timing);
  }
  counters::add(event.status                                        ? stats_.pulls_done
                : event.status.error().code == ErrorCode::cancelled ? stats_.pulls_cancelled
                                                                    : stats_.pulls_failed);
  counters::subtract(stats_.pulls);
  if (pull.group != nullptr && pull.parts.empty()) std::erase(pull.group->waiting, pull.id);
  PullListener* const listener = pull.listener;
  pulls_.erase(pull.id);
  {
    const MutexLock lock{front_mutex_};
    --live_pulls_;
  }
  if (listener != nullptr) return listener->pull_done(event);
  events_.push(std::move(event));
}

// ---- time ------------------------------------------------------------------------------------------

void DecodeRank::Impl::sweep() {
  const TimePoint time = now();
  const Duration interval = std::min<Duration>(options_.heartbeat, options_.peer_timeout) / 4;
  if (time - std::exchange(swept_, time) > options_.heartbeat) {
    // This thread did not run for a while. What came meanwhile is read before anyone is judged.
    thread_->loop().at(time, [this] { sweep(); });
    return;
  }

  drop_retired();

  std::vector<std::pair<Session*, std::string>> hung;
  for (auto& [id, group] : groups_) {
    for (auto& peer : group->peers) {
      Session* const session = peer->session.get();
      if (session == nullptr || session->connection == nullptr) continue;
      if (!peer->ready && time > session->setup_deadline) {
        hung.emplace_back(session, "the handshake took too long");
      } else if (peer->ready &&
                 time - session->connection->last_received() > options_.peer_timeout) {
        hung.emplace_back(session,
                          fmt::format("silent for more than {} ms", options_.peer_timeout.count()));
      } else if (session->endpoint != nullptr && time >= session->ping_due) {
        session->ping_due = time + options_.heartbeat;
        (void)session->connection->send(wire::Ping{++session->pings});
      }
    }
  }
  for (const Landing& landing : landings_) {
    if (landing.state == Landing::State::fetching && !landing.session->lost &&
        time - landing.started > options_.fetch_timeout) {
      hung.emplace_back(landing.session,
                        fmt::format("a fetch of {} bytes took more than {} ms",
                                    landing.ready.payload_bytes, options_.fetch_timeout.count()));
    }
  }
  for (auto& [session, why] : hung) lose(*session, Error{ErrorCode::unavailable, std::move(why)});

  std::vector<std::uint64_t> late;
  for (const auto& [id, pull] : pulls_) {
    if (pull->state != Pull::State::failing && time >= pull->deadline) late.push_back(id);
  }
  for (const std::uint64_t id : late) {
    if (Pull* pull = find_pull(id)) {
      fail(*pull,
           Error{ErrorCode::deadline_exceeded,
                 fmt::format("room {} was not complete at its deadline", index(pull->room))});
    }
  }

  pump();
  thread_->loop().at(time + interval, [this] { sweep(); });
}

void DecodeRank::Impl::close() noexcept {
  {
    std::unique_lock lock{front_mutex_};
    if (thread_ == nullptr || landing_registered_ == nullptr) return;  // never started
    if (!closing_) {
      closing_ = true;
      post([this] { begin_close(); });
    }
    front_changed_.notify_all();
    front_changed_.wait(lock, [this] { return closed_; });
  }
  thread_->stop();
}

void DecodeRank::Impl::begin_close() {
  draining_ = true;
  close_deadline_ = SteadyClock::instance().now() + kCloseDeadline;
  std::vector<std::uint64_t> pulls;
  for (const auto& [id, pull] : pulls_) pulls.push_back(id);
  for (const std::uint64_t id : pulls) {
    if (Pull* pull = find_pull(id))
      fail(*pull, Error{ErrorCode::cancelled, "the decode rank is closing"});
  }
  std::vector<GroupId> groups;
  for (const auto& [id, group] : groups_) groups.push_back(group->id);
  for (const GroupId group : groups) remove_group(group);
  finish_close();
}

// Waits, turn by turn, until nothing touches our memory any more.
void DecodeRank::Impl::finish_close() {
  drop_retired();
  const bool idle = retired_.empty() && thread_->engine().in_flight() == 0;
  if (!idle && SteadyClock::instance().now() < close_deadline_)
    return post([this] { finish_close(); });
  if (!idle)
    log::error("closed with {} endpoints and {} copies in flight", retired_.size(),
               thread_->engine().in_flight());
  const MutexLock lock{front_mutex_};
  closed_ = true;
  front_changed_.notify_all();
}

// ---- the public class ------------------------------------------------------------------------------

std::string summarize(const PullEvent& event) {
  std::string line =
      fmt::format("room {}: {}, {} bytes by {} from {} ranks in {:.3f} ms", index(event.room),
                  event.status ? "ok" : to_string(event.status.error().code), event.bytes,
                  to_string(event.path), event.sources.size(),
                  std::chrono::duration<double, std::milli>{event.total}.count());
  const auto slowest =
      std::max_element(event.sources.begin(), event.sources.end(),
                       [](const auto& a, const auto& b) { return a.landed < b.landed; });
  if (slowest != event.sources.end() && slowest->pieces > 0) {
    line += fmt::format(", slowest rank {}: landed after {:.3f} ms, wire {:.3f} ms",
                        slowest->shard_rank,
                        std::chrono::duration<double, std::milli>{slowest->landed}.count(),
                        std::chrono::duration<double, std::milli>{slowest->wire}.count());
  }
  if (!event.status) line += ": " + event.status.error().message;
  return line;
}

DecodeRank::DecodeRank(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
DecodeRank::~DecodeRank() = default;
Result<GroupId> DecodeRank::connect(const GroupSpec& group, std::chrono::milliseconds deadline) {
  return impl_->connect(group, deadline);
}
void DecodeRank::disconnect(GroupId group) {
  impl_->disconnect(group);
}
Result<PathReport> DecodeRank::path(GroupId group, std::uint32_t shard_rank) const {
  return impl_->path(group, shard_rank);
}
Result<PullId> DecodeRank::pull(const PullRequest& request) {
  return impl_->pull(request);
}
void DecodeRank::cancel(PullId pull) {
  impl_->cancel(pull);
}
std::size_t DecodeRank::poll(std::span<PullEvent> events) {
  return impl_->poll(events);
}
int DecodeRank::event_fd() const noexcept {
  return impl_->event_fd();
}
DecodeStats DecodeRank::stats() const {
  return impl_->stats();
}
void DecodeRank::close() noexcept {
  impl_->close();
}

}  // namespace kvshard
