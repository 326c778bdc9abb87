#include "kvshard/prefill_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/assert.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/random.hpp"
#include "base/try.hpp"
#include "control/connection.hpp"
#include "kvshard/send_filter.hpp"
#include "session/event_queue.hpp"
#include "session/pool_view.hpp"
#include "session/progress_thread.hpp"
#include "session/slot_table.hpp"
#include "session/time_limits.hpp"
#include "wire/codec.hpp"
#include "wire/messages.hpp"

namespace kvshard {
namespace {

constexpr std::chrono::milliseconds kCloseDeadline{2'000};
// Remembered, so that a late PULL is answered at once.
constexpr std::size_t kMaxEndedRooms = 16'384;

}  // namespace

// All state but front_ and events_ is used on the progress thread only; public calls check what they can
// against front_ and post the rest.
class PrefillRank::Impl final : public SlotTable::Owner {
 public:
  Impl(PrefillOptions options, SendFilter filter, PoolView whole, const Clock& clock)
      : options_{std::move(options)},
        filter_{filter},
        layout_{filter.layout()},
        whole_view_{std::move(whole)},
        clock_{clock},
        incarnation_{random_id()} {}
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
  void close() noexcept;

 private:
  // What public calls check against, before anything is posted.
  struct FrontRoom {
    bool last{false};
    std::optional<std::uint32_t> base;  // owner of position 0: all chunks continue one cyclic chain
  };

  // The owned part of a published chunk.
  struct OwnedChunk {
    std::vector<LocalPage> pages;
    Run positions;  // pages[i] is at first + i * stride
    std::vector<std::pair<std::uint32_t, std::uint32_t>> buffers;  // ranges (first, count)
    EventHandle ready{nullptr};

    // How many of its positions lie before `position`.
    [[nodiscard]] std::uint32_t before(std::uint32_t position) const noexcept {
      if (position <= positions.first) return 0;
      return std::min(positions.count, (position - positions.first - 1) / positions.stride + 1);
    }
  };

  struct Room {
    RoomId id{};
    std::uint32_t unclaimed{0};  // pullers that have not come yet
    std::vector<OwnedChunk> chunks;
    std::optional<std::uint32_t> length;  // positions, once the last chunk is here
    TimePoint expires{TimePoint::max()};  // for the unclaimed, from the last chunk on
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
    std::uint32_t first{0}, end{0};
    std::uint32_t window{1};
    bool queued{false};

    // Where it stands in the room's chunks.
    std::size_t chunk{0};
    std::size_t range{0};
    std::optional<PieceCutter> cutter;

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
      rank.lose_peer(*this, std::move(error));
    }

    Impl& rank;
    std::uint64_t id;
    std::string name;
    std::unique_ptr<Connection> connection;
    TimePoint connected_at{};
    TimePoint ping_due{};
    std::uint64_t pings{0};
    bool welcomed{false};
    std::optional<PoolView> view;
    std::uint64_t capacity{0};
    std::unordered_map<std::uint64_t, std::uint64_t> leases;  // pull -> lease id
    std::unordered_map<std::uint64_t, RoomId> waiting;  // pulls of rooms that are not open yet
    std::uint32_t slots{0};
    std::deque<std::uint64_t> parked;  // leases that wait for this peer's share of slots
  };

  struct WaitingPull {
    std::uint64_t peer;
    wire::Pull pull;
    TimePoint deadline;
  };

  // Control.
  void on_accept(UniqueFd fd, std::string name);
  void on_frame(Peer& peer, wire::MessageType type, std::span<const std::byte> payload) noexcept;
  template <typename Message>
  void dispatch(Peer& peer, std::span<const std::byte> payload,
                void (Impl::*handler)(Peer&, Message&));
  void on_hello(Peer& peer, std::span<const std::byte> payload);
  Status check_hello(const wire::Hello& hello) const;
  void on_pull(Peer& peer, wire::Pull& pull);
  void on_release(Peer& peer, wire::Release& release);
  void on_commit(Peer& peer, wire::Commit& commit);
  void on_abort(Peer& peer, wire::Abort& abort);
  void stop_waiting(Peer& peer, std::uint64_t pull);
  void refuse(Peer& peer, Error error);
  void lose_peer(Peer& peer, Error error) noexcept;

  // Rooms and leases.
  void open_room(RoomId room, std::uint32_t pullers);
  void add_chunk(RoomId room, OwnedChunk chunk, std::optional<std::uint32_t> length,
                 std::vector<std::byte> side_data);
  void abort_room(RoomId room, Error error);
  void claim(Peer& peer, Room& room, const wire::Pull& pull);
  std::string commit_problem(const Lease& lease, const wire::Commit& commit) const;
  enum class Tell : bool { no, yes };
  void end_lease(Lease& lease, Status status, Tell tell);
  void end_room_if_idle(Room& room);

  // Slots.
  void enqueue(Lease& lease);
  bool advance(Lease& lease);
  void finish_if_drained(Lease& lease);
  void pump();
  bool gather(Lease& lease);
  [[nodiscard]] std::size_t share() const noexcept;
  void unpark(Peer& peer);
  void slot_gathered(std::uint32_t index, Status status) noexcept override;
  void announce(Lease& lease);
  void free_slot(SlotTable::Slot& slot);

  void sweep();
  void begin_close();
  void finish_close();

  template <typename Fn>
  void post(Fn fn) {
    thread_->loop().post(std::move(fn));
  }
  [[nodiscard]] TimePoint now() const noexcept { return thread_->loop().now(); }

  const PrefillOptions options_;
  const SendFilter filter_;
  const PageLayout layout_;
  const PoolView whole_view_;  // this rank's pool against itself: sizes only
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

  std::unique_ptr<StagingMemory> staging_memory_;
  std::unique_ptr<ProgressThread> thread_;
  std::unique_ptr<RegisteredMemory> staging_;
  std::optional<SlotTable> slots_;
  std::unique_ptr<Listener> listener_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Peer>> peers_;
  std::unordered_map<RoomId, std::unique_ptr<Room>> rooms_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Lease>> leases_;
  std::unordered_map<RoomId, std::vector<WaitingPull>> waiting_;
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
  std::size_t welcomed_{0};              // of peers_
  std::deque<std::uint64_t> run_queue_;  // leases with work, each at most once
  std::uint64_t next_peer_{1};
  std::uint64_t next_lease_{1};
  PoolView::Selection selection_;
  TimePoint swept_{};  // when sweep() last ran
  TimePoint close_deadline_{};
  bool draining_{false};
};

// ---- set-up ----------------------------------------------------------------------------------------

Result<std::unique_ptr<PrefillRank>> PrefillRank::create(PrefillOptions options,
                                                         std::unique_ptr<Transport> transport,
                                                         std::unique_ptr<CopyEngine> engine,
                                                         const Clock* clock) {
  if (transport == nullptr || engine == nullptr)
    return Error{ErrorCode::invalid_argument, "a transport and a copy engine are required"};
  KVSHARD_TRY(validate(options.pool));
  if (options.shard_rank >= options.shard_size) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("shard_rank {} is not below shard_size {}", options.shard_rank,
                             options.shard_size)};
  }
  if (options.epoch == 0 || options.slots == 0 || options.group.size() > kMaxNameBytes) {
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("epoch {} and slots {} must not be 0, group name of {} bytes not above {}",
                    options.epoch, options.slots, options.group.size(), kMaxNameBytes)};
  }
  KVSHARD_TRY(check_times({{"lease", options.lease},
                           {"slot_timeout", options.slot_timeout},
                           {"pull_timeout", options.pull_timeout},
                           {"heartbeat", options.heartbeat},
                           {"peer_timeout", options.peer_timeout}},
                          options.heartbeat, options.peer_timeout));
  KVSHARD_TRY(
      const auto layout,
      PageLayout::create(options.shard_size, options.pool.geometry.groups.front().page_size));
  KVSHARD_TRY(const auto filter, SendFilter::create(layout, options.shard_rank));
  PoolView view{options.pool, options.pool.geometry, options.pool.geometry};
  for (std::uint32_t b = 0; b < view.buffers(); ++b) {
    if (view.page_bytes(b, 1) > options.slot_payload_bytes) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("slot_payload_bytes {} holds no page of {} bytes",
                               options.slot_payload_bytes, view.page_bytes(b, 1))};
    }
  }
  auto impl = std::make_unique<Impl>(std::move(options), filter, std::move(view),
                                     clock != nullptr ? *clock : SteadyClock::instance());
  KVSHARD_TRY(impl->start(std::move(transport), std::move(engine)));
  return std::unique_ptr<PrefillRank>{new PrefillRank{std::move(impl)}};
}

Status PrefillRank::Impl::start(std::unique_ptr<Transport> transport,
                                std::unique_ptr<CopyEngine> engine) {
  KVSHARD_TRY(events_.open());
  slot_stride_ = (slot_bytes_for(options_.slot_payload_bytes) + 4095) / 4096 * 4096;
  KVSHARD_TRY(staging_memory_, make_staging_memory(engine->memory_kind(), engine->device(),
                                                   slot_stride_ * options_.slots));
  KVSHARD_TRY(thread_, ProgressThread::create(std::move(transport), std::move(engine), clock_));
  KVSHARD_TRY(staging_, thread_->transport().register_memory(staging_memory_->bytes(),
                                                             staging_memory_->kind()));
  KVSHARD_TRY(thread_->transport().serve(*staging_));
  slots_.emplace(*this, staging_memory_->bytes().data(), options_.slots, slot_stride_);
  KVSHARD_TRY(const auto address, SocketAddress::parse(options_.listen_host, options_.listen_port));
  KVSHARD_TRY(listener_,
              Listener::create(thread_->loop(), address, [this](UniqueFd fd, std::string name) {
                on_accept(std::move(fd), std::move(name));
              }));
  port_ = listener_->port();
  thread_->loop().post([this] {
    swept_ = now();
    sweep();
  });
  thread_->start();
  started_ = true;
  return {};
}

PrefillRank::Impl::~Impl() {
  close();
}

GroupMember PrefillRank::Impl::member() const {
  return {.shard_rank = options_.shard_rank,
          .host = options_.listen_host,
          .port = port_,
          .incarnation = incarnation_};
}

RankAnnouncement PrefillRank::Impl::announcement() const {
  return {.group = options_.group,
          .epoch = options_.epoch,
          .shard_rank = options_.shard_rank,
          .shard_size = options_.shard_size,
          .incarnation = incarnation_,
          .host = options_.listen_host,
          .port = port_,
          .geometry_fields = describe(options_.pool.geometry)};
}

// ---- public calls: check, then post ----------------------------------------------------------------

Status PrefillRank::Impl::open(RoomId room, std::uint32_t pullers) {
  if (pullers == 0) return Error{ErrorCode::invalid_argument, "a room needs at least one puller"};
  {
    const MutexLock lock{front_mutex_};
    if (closing_) return Error{ErrorCode::failed_precondition, "the rank is closed"};
    if (front_.size() >= options_.max_rooms) {
      return Error{ErrorCode::resource_exhausted, fmt::format("{} rooms are open, max_rooms is {}",
                                                              front_.size(), options_.max_rooms)};
    }
    if (!front_.try_emplace(room).second)
      return Error{ErrorCode::failed_precondition,
                   fmt::format("room {} is open already", index(room))};
    // Posted under the lock, so that the progress thread sees calls about a room in the order they took.
    post([this, room, pullers] { open_room(room, pullers); });
  }
  return {};
}

Status PrefillRank::Impl::publish(RoomId room, const Chunk& chunk) {
  const std::uint32_t layers = [&] {
    std::uint32_t most = 0;
    for (const BufferGroup& group : options_.pool.geometry.groups)
      most = std::max(most, group.layers);
    return most;
  }();
  if (chunk.first_layer > layers || chunk.layer_count > layers - chunk.first_layer ||
      (chunk.layer_count == 0 && chunk.first_layer != 0)) {
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("layers [{}, +{}) of {}", chunk.first_layer, chunk.layer_count, layers)};
  }
  if (chunk.side_data.size() > wire::kMaxSideDataBytes ||
      (!chunk.last && !chunk.side_data.empty())) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} bytes of side data: at most {}, and only with the last chunk",
                             chunk.side_data.size(), wire::kMaxSideDataBytes)};
  }
  if (chunk.pages.size() > std::numeric_limits<std::uint32_t>::max() - chunk.first_position)
    return Error{ErrorCode::invalid_argument, "positions beyond 2^32"};
  if (chunk.ready != nullptr && thread_->engine().memory_kind() != MemoryKind::cuda)
    return Error{ErrorCode::unsupported, "a ready event needs the CUDA copy engine"};

  OwnedChunk owned;
  owned.pages.resize(filter_.capacity(chunk.pages.size()));
  KVSHARD_TRY(const OwnedPages selected,
              filter_.select(chunk.pages, Position{chunk.first_position}, owned.pages));
  owned.pages.resize(selected.pages.size());
  owned.positions = selected.positions;
  for (std::uint32_t i = 0; i < owned.pages.size(); ++i) {
    if (index(owned.pages[i]) >= whole_view_.page_count()) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("page {} at position {} is local page {}, and the pool has {}",
                               index(layout_.logical(options_.shard_rank, owned.pages[i])),
                               index(selected.position(i)), index(owned.pages[i]),
                               whole_view_.page_count())};
    }
  }
  owned.buffers = whole_view_.layer_ranges(chunk.first_layer,
                                           chunk.layer_count != 0 ? chunk.layer_count : layers);
  owned.ready = chunk.ready;
  std::optional<std::uint32_t> length;
  if (chunk.last) length = chunk.first_position + static_cast<std::uint32_t>(chunk.pages.size());

  const MutexLock lock{front_mutex_};
  const auto found = front_.find(room);
  if (found == front_.end())
    return Error{ErrorCode::failed_precondition,
                 fmt::format("room {} is not open, or has ended", index(room))};
  if (found->second.last)
    return Error{ErrorCode::failed_precondition,
                 fmt::format("room {} has its last chunk already", index(room))};
  if (!chunk.pages.empty()) {
    if (found->second.base.value_or(selected.base) != selected.base) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format(
              "position {} continues a chain of base {}, what was published before has base {}",
              chunk.first_position, selected.base, *found->second.base)};
    }
    found->second.base = selected.base;
  }
  found->second.last = chunk.last;
  post([this, room, owned = std::move(owned), length,
        side_data =
            std::vector<std::byte>{chunk.side_data.begin(), chunk.side_data.end()}]() mutable {
    add_chunk(room, std::move(owned), length, std::move(side_data));
  });
  return {};
}

Status PrefillRank::Impl::abort(RoomId room, std::string reason) {
  const MutexLock lock{front_mutex_};
  if (!front_.contains(room))
    return Error{ErrorCode::failed_precondition,
                 fmt::format("room {} is not open, or has ended", index(room))};
  post([this, room, reason = std::move(reason)]() mutable {
    abort_room(room, Error{ErrorCode::cancelled, std::move(reason)});
  });
  return {};
}

// ---- control ---------------------------------------------------------------------------------------

void PrefillRank::Impl::on_accept(UniqueFd fd, std::string name) {
  if (peers_.size() >= options_.max_peers || draining_) {
    counters::add(stats_.peers_refused);
    return;  // the socket closes
  }
  auto peer = std::make_shared<Peer>(*this, next_peer_++, std::move(name));
  auto connection = Connection::adopt(thread_->loop(), std::move(fd), *peer);
  if (!connection) return;
  peer->connection = std::move(connection).value();
  peer->connected_at = now();
  peer->ping_due = now() + options_.heartbeat;
  counters::add(stats_.peers);
  peers_.emplace(peer->id, std::move(peer));
}

template <typename Message>
void PrefillRank::Impl::dispatch(Peer& peer, std::span<const std::byte> payload,
                                 void (Impl::*handler)(Peer&, Message&)) {
  auto message = wire::decode<Message>(payload);
  if (!message) return refuse(peer, std::move(message).error());
  (this->*handler)(peer, *message);
}

void PrefillRank::Impl::on_frame(Peer& peer, wire::MessageType type,
                                 std::span<const std::byte> payload) noexcept {
  using wire::MessageType;
  if (type == MessageType::ping) return;  // any byte is a sign of life
  if (type == MessageType::bye)
    return lose_peer(peer, Error{ErrorCode::unavailable, "the decode rank left"});
  if (type == MessageType::hello && !peer.welcomed) return on_hello(peer, payload);
  if (peer.welcomed) {
    switch (type) {
      case MessageType::pull:
        return dispatch<wire::Pull>(peer, payload, &Impl::on_pull);
      case MessageType::release:
        return dispatch<wire::Release>(peer, payload, &Impl::on_release);
      case MessageType::commit:
        return dispatch<wire::Commit>(peer, payload, &Impl::on_commit);
      case MessageType::abort:
        return dispatch<wire::Abort>(peer, payload, &Impl::on_abort);
      default:
        break;
    }
  }
  refuse(peer, Error{ErrorCode::failed_precondition,
                     fmt::format("message type {} is not expected {} WELCOME",
                                 static_cast<int>(type), peer.welcomed ? "after" : "before")});
}

void PrefillRank::Impl::refuse(Peer& peer, Error error) {
  counters::add(stats_.peers_refused);
  log::warning("peer refused: {}: {}", peer.name, error.message);
  (void)peer.connection->send(wire::Bye{error});
  peer.connection->flush_and_close();
  lose_peer(peer, std::move(error));
}

void PrefillRank::Impl::lose_peer(Peer& peer, Error error) noexcept {
  const auto found = peers_.find(peer.id);
  if (found == peers_.end()) return;
  const std::shared_ptr<Peer> keep = found->second;  // we may be inside one of its calls
  peers_.erase(found);
  counters::subtract(stats_.peers);
  if (peer.welcomed) {
    --welcomed_;
    counters::add(stats_.peers_lost);
    log::info("peer lost: decode {}, {} pulls: {}", peer.name, peer.leases.size(), error.message);
  }
  peer.connection->close();
  while (!peer.leases.empty()) {
    end_lease(*leases_.at(peer.leases.begin()->second),
              Error{ErrorCode::unavailable,
                    fmt::format("decode rank {} lost: {}", peer.name, error.message)},
              Tell::no);
  }
  while (!peer.waiting.empty()) stop_waiting(peer, peer.waiting.begin()->first);
  for (auto& [id, other] : peers_) unpark(*other);  // its share of the slots goes to the others
  pump();
  post([keep] {});  // destroyed from the loop, not from inside its own call
}

Status PrefillRank::Impl::check_hello(const wire::Hello& hello) const {
  const auto differs = [](std::string_view field, const auto& want, const auto& have) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("{}: decode wants {}, prefill has {}", field, want, have)};
  };
  if (!hello.group.empty() && hello.group != options_.group)
    return differs("group", hello.group, options_.group);
  if (hello.epoch != 0 && hello.epoch != options_.epoch)
    return differs("epoch", hello.epoch, options_.epoch);
  if (hello.shard_size != options_.shard_size)
    return differs("shard_size", hello.shard_size, options_.shard_size);
  if (hello.shard_rank != options_.shard_rank)
    return differs("shard_rank", hello.shard_rank, options_.shard_rank);
  if (hello.transport != thread_->transport().kind())
    return differs("transport", hello.transport, thread_->transport().kind());
  if (hello.heartbeat_ms >= static_cast<std::uint64_t>(options_.peer_timeout.count())) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("heartbeat_ms: decode sends one each {} ms, prefill waits {} ms",
                             hello.heartbeat_ms, options_.peer_timeout.count())};
  }
  KVSHARD_TRY(validate(hello.geometry));
  KVSHARD_TRY(check_compatible(options_.pool.geometry, hello.geometry));
  for (std::uint32_t b = 0; b < whole_view_.buffers(); ++b) {
    if (whole_view_.page_bytes(b, 1) > hello.landing_payload_bytes)
      return differs("landing_payload_bytes", hello.landing_payload_bytes,
                     whole_view_.page_bytes(b, 1));
  }
  return {};
}

void PrefillRank::Impl::on_hello(Peer& peer, std::span<const std::byte> payload) {
  const auto versions = wire::decode_hello_prefix(payload);
  if (!versions) return refuse(peer, versions.error());
  if (versions->version_min > wire::kProtocolVersion ||
      versions->version_max < wire::kProtocolVersion) {
    return refuse(peer, Error{ErrorCode::failed_precondition,
                              fmt::format("protocol version: decode speaks {} to {}, prefill {}",
                                          versions->version_min, versions->version_max,
                                          wire::kProtocolVersion)});
  }
  auto hello = wire::decode<wire::Hello>(payload);
  if (!hello) return refuse(peer, std::move(hello).error());
  if (Status fits = check_hello(*hello); !fits) return refuse(peer, std::move(fits).error());

  peer.view.emplace(options_.pool, options_.pool.geometry, hello->geometry);
  peer.capacity = std::min(options_.slot_payload_bytes, hello->landing_payload_bytes);
  peer.welcomed = true;
  ++welcomed_;
  const auto address = thread_->transport().address();
  const auto staging = staging_->packed();
  (void)peer.connection->send(
      wire::Welcome{.version = wire::kProtocolVersion,
                    .incarnation = incarnation_,
                    .epoch = options_.epoch,
                    .shard_rank = options_.shard_rank,
                    .shard_size = options_.shard_size,
                    .geometry = options_.pool.geometry,
                    .transport_address = {address.begin(), address.end()},
                    .staging = {staging.begin(), staging.end()},
                    .slot_count = options_.slots,
                    .slot_stride = slot_stride_,
                    .heartbeat_ms = static_cast<std::uint32_t>(options_.heartbeat.count())});
}

// ---- rooms and leases ------------------------------------------------------------------------------

void PrefillRank::Impl::open_room(RoomId id, std::uint32_t pullers) {
  ended_.erase(id);
  auto& room = rooms_[id];
  room = std::make_unique<Room>();
  room->id = id;
  room->unclaimed = pullers;
  if (const auto given_up = given_up_.extract(id)) {
    room->unclaimed -= std::min(pullers, given_up.mapped());
    room->status = Error{ErrorCode::cancelled,
                         fmt::format("{} of {} pullers gave up before the room was opened",
                                     given_up.mapped(), pullers)};
  }
  counters::add(stats_.rooms_opened);
  counters::add(stats_.rooms);
  if (const auto waiting = waiting_.extract(id)) {
    counters::subtract(stats_.pulls_waiting, waiting.mapped().size());
    for (const WaitingPull& pull : waiting.mapped()) {
      Peer& peer = *peers_.at(pull.peer);
      peer.waiting.erase(pull.pull.pull);
      claim(peer, *room, pull.pull);  // cannot end the room: its length is not known yet
    }
    pump();
  }
  if (const auto opened = rooms_.find(id); opened != rooms_.end())
    end_room_if_idle(*opened->second);
}

void PrefillRank::Impl::add_chunk(RoomId id, OwnedChunk chunk, std::optional<std::uint32_t> length,
                                  std::vector<std::byte> side_data) {
  const auto found = rooms_.find(id);
  if (found == rooms_.end()) return;  // ended meanwhile
  Room& room = *found->second;
  if (!chunk.pages.empty())
    room.chunks.push_back(std::move(chunk));  // a rank that owns nothing sends nothing
  if (length) {
    room.length = length;
    room.side_data = std::move(side_data);
    room.expires = now() + options_.lease;
    const std::vector<std::uint64_t> leases = room.leases;  // end_lease() edits the list
    for (const std::uint64_t lease_id : leases) {
      Lease& lease = *leases_.at(lease_id);
      if (lease.end == *length) continue;
      end_lease(lease,
                Error{ErrorCode::invalid_argument,
                      fmt::format("room {} has {} positions, the pull ends at {}", index(id),
                                  *length, lease.end)},
                Tell::yes);
      if (!rooms_.contains(id)) return;
    }
  }
  for (const std::uint64_t lease : room.leases) enqueue(*leases_.at(lease));
  pump();
}

void PrefillRank::Impl::abort_room(RoomId id, Error error) {
  const auto found = rooms_.find(id);
  if (found == rooms_.end()) return;
  Room& room = *found->second;
  if (room.status) room.status = error;
  room.unclaimed = 0;
  const std::vector<std::uint64_t> leases = room.leases;
  for (const std::uint64_t lease : leases) end_lease(*leases_.at(lease), error, Tell::yes);
  if (leases.empty()) end_room_if_idle(room);  // else the last end_lease() did
  pump();
}

void PrefillRank::Impl::on_pull(Peer& peer, wire::Pull& pull) {
  const auto answer = [&](ErrorCode code, std::string message) {
    (void)peer.connection->send(wire::Abort{pull.pull, Error{code, std::move(message)}});
  };
  if (pull.first_position > pull.end_position || pull.window == 0) {
    return refuse(peer, Error{ErrorCode::invalid_argument,
                              fmt::format("PULL of positions [{}, {}) with window {}",
                                          pull.first_position, pull.end_position, pull.window)});
  }
  if (peer.leases.contains(pull.pull) || peer.waiting.contains(pull.pull))
    return refuse(
        peer, Error{ErrorCode::invalid_argument, fmt::format("pull {} exists already", pull.pull)});
  if (peer.leases.size() + peer.waiting.size() >= options_.max_pulls_per_peer) {
    return answer(ErrorCode::resource_exhausted,
                  fmt::format("{} pulls of this peer are running or waiting",
                              peer.leases.size() + peer.waiting.size()));
  }
  if (const auto room = rooms_.find(pull.room); room != rooms_.end()) {
    claim(peer, *room->second, pull);
    return pump();
  }
  if (const auto ended = ended_.find(pull.room); ended != ended_.end()) {
    counters::add(stats_.late_messages);
    return answer(ErrorCode::unavailable,
                  fmt::format("room {} has ended: {}", index(pull.room), ended->second.why));
  }
  peer.waiting.emplace(pull.pull, pull.room);
  counters::add(stats_.pulls_waiting);
  waiting_[pull.room].push_back({peer.id, pull, now() + std::chrono::milliseconds{pull.wait_ms}});
}

void PrefillRank::Impl::claim(Peer& peer, Room& room, const wire::Pull& pull) {
  if (room.unclaimed == 0) {
    (void)peer.connection->send(
        wire::Abort{pull.pull, Error{ErrorCode::failed_precondition,
                                     fmt::format("room {} has all its pullers", index(room.id))}});
    return;
  }
  --room.unclaimed;
  const std::uint64_t id = next_lease_++;
  auto made = std::make_unique<Lease>();
  Lease& lease = *made;
  lease.id = id;
  lease.peer = &peer;
  lease.room = &room;
  lease.pull = pull.pull;
  lease.first = pull.first_position;
  lease.end = pull.end_position;
  lease.window = pull.window;
  lease.deadline = now() + options_.pull_timeout;
  leases_.emplace(id, std::move(made));
  peer.leases.emplace(pull.pull, id);
  room.leases.push_back(id);
  counters::add(stats_.pulls_started);
  counters::add(stats_.leases);
  if (room.length && *room.length != lease.end) {
    end_lease(lease,
              Error{ErrorCode::invalid_argument,
                    fmt::format("room {} has {} positions, the pull ends at {}", index(room.id),
                                *room.length, lease.end)},
              Tell::yes);
    return;
  }
  enqueue(lease);
}

// Every lease ends here, once. Slots that it still holds are taken back: at once when exposed (the next
// take() raises the generation before a byte changes), after its gather otherwise.
void PrefillRank::Impl::end_lease(Lease& lease, Status status, Tell tell) {
  if (tell == Tell::yes)
    (void)lease.peer->connection->send(wire::Abort{lease.pull, status.error()});
  Room& room = *lease.room;
  if (status) {
    counters::add(stats_.pulls_committed);
  } else {
    counters::add(stats_.pulls_failed);
    if (room.status) room.status = std::move(status);
  }
  counters::subtract(stats_.leases);
  if (lease.slots > 0) {
    for (SlotTable::Slot& slot : *slots_) {
      if (slot.lease != lease.id) continue;
      slot.lease = 0;
      if (slot.state != SlotTable::State::gathering) free_slot(slot);
    }
    lease.peer->slots -= lease.slots;
  }
  Peer& peer = *lease.peer;
  peer.leases.erase(lease.pull);
  std::erase(room.leases, lease.id);
  leases_.erase(lease.id);
  unpark(peer);  // the lease may have held the peer's share, or been the one that was to use it
  end_room_if_idle(room);
}

void PrefillRank::Impl::end_room_if_idle(Room& room) {
  if (room.unclaimed > 0 || !room.leases.empty() || room.gathering > 0) return;
  const RoomId id = room.id;
  counters::add(room.status ? stats_.rooms_done : stats_.rooms_failed);
  counters::subtract(stats_.rooms);
  const std::uint64_t number = ++ended_count_;
  ended_[id] = {number, room.status ? "all its pullers committed" : room.status.error().message};
  ended_order_.emplace_back(number, id);
  if (ended_order_.size() > kMaxEndedRooms) {
    const auto& [oldest, oldest_id] = ended_order_.front();
    const auto found = ended_.find(oldest_id);
    if (found != ended_.end() && found->second.number == oldest) ended_.erase(found);
    ended_order_.pop_front();
  }
  {
    const MutexLock lock{front_mutex_};
    front_.erase(id);
  }
  events_.push({id, std::move(room.status)});
  rooms_.erase(id);
}

// ---- slots -----------------------------------------------------------------------------------------

void PrefillRank::Impl::enqueue(Lease& lease) {
  if (lease.queued) return;
  lease.queued = true;
  run_queue_.push_back(lease.id);
}

// Moves a lease to its next piece; false when it has none now.
bool PrefillRank::Impl::advance(Lease& lease) {
  const std::vector<OwnedChunk>& chunks = lease.room->chunks;
  for (; lease.chunk < chunks.size(); ++lease.chunk, lease.range = 0) {
    const OwnedChunk& chunk = chunks[lease.chunk];
    const std::uint32_t low = chunk.before(lease.first);
    const std::uint32_t high = chunk.before(lease.end);
    for (; low < high && lease.range < chunk.buffers.size(); ++lease.range, lease.cutter.reset()) {
      if (!lease.cutter)
        lease.cutter.emplace(low, high, chunk.buffers[lease.range].first,
                             chunk.buffers[lease.range].second);
      if (!lease.cutter->done()) return true;
    }
  }
  return false;
}

// The end of the stream: no piece is left and none can come.
void PrefillRank::Impl::finish_if_drained(Lease& lease) {
  if (lease.last_sent || lease.gathering > 0 || !lease.room->length || advance(lease)) return;
  lease.last_sent = true;
  (void)lease.peer->connection->send(wire::Ready{.pull = lease.pull,
                                                 .lease = lease.id,
                                                 .piece = lease.pieces.size(),
                                                 .last = true,
                                                 .side_data = lease.room->side_data});
}

// Gives free slots to leases with work, in turn, so that a long request does not hold up short ones.
void PrefillRank::Impl::pump() {
  while (!run_queue_.empty()) {
    const auto found = leases_.find(run_queue_.front());
    if (found == leases_.end()) {
      run_queue_.pop_front();
      continue;
    }
    Lease& lease = *found->second;
    if (advance(lease)) {
      if (lease.slots >= lease.window) {  // its next release brings it back
        run_queue_.pop_front();
        lease.queued = false;
        continue;
      }
      if (!slots_->available()) return;
      run_queue_.pop_front();
      if (lease.peer->slots >= share()) {
        lease.peer->parked.push_back(lease.id);  // still `queued`: on the peer's list
        continue;
      }
      lease.queued = false;
      if (gather(lease)) enqueue(lease);
    } else {
      run_queue_.pop_front();
      lease.queued = false;
      finish_if_drained(lease);
    }
  }
}

// How many slots one peer may hold, so that one that does not release cannot take them all.
std::size_t PrefillRank::Impl::share() const noexcept {
  return std::max<std::size_t>(1, slots_->size() / std::max<std::size_t>(1, welcomed_));
}

// The peer may hold more slots than before: as many of its parked leases run again. A lease that runs
// takes a slot, or has one whose release comes here, or ends, which comes here too; so none is left behind.
void PrefillRank::Impl::unpark(Peer& peer) {
  for (std::size_t held = peer.slots; held < share() && !peer.parked.empty();) {
    const std::uint64_t id = peer.parked.front();
    peer.parked.pop_front();
    if (!leases_.contains(id)) continue;
    run_queue_.push_back(id);
    ++held;
  }
}

// Starts the lease's next piece in a free slot; false when that ended the lease.
bool PrefillRank::Impl::gather(Lease& lease) {
  const OwnedChunk& chunk = lease.room->chunks[lease.chunk];
  const Piece piece = lease.cutter->next(*lease.peer->view, lease.peer->capacity);
  const std::span pages = std::span{chunk.pages}.subspan(piece.first_page, piece.page_count);
  lease.peer->view->select(piece.first_buffer, piece.buffer_count, pages, selection_);
  const std::uint64_t payload =
      lease.peer->view->page_bytes(piece.first_buffer, piece.buffer_count) * piece.page_count;

  SlotTable::Slot& slot = slots_->take(lease.id, lease.pieces.size());
  counters::add(stats_.slots_in_use);
  slot.ready = {
      .pull = lease.pull,
      .lease = lease.id,
      .piece = slot.piece,
      .slot = slot.index,
      .generation = slot.generation,
      .payload_bytes = payload,
      .first_buffer = piece.first_buffer,
      .buffer_count = piece.buffer_count,
      .checksum = options_.checksum,
      .positions = {{.first = chunk.positions.first + piece.first_page * chunk.positions.stride,
                     .stride = chunk.positions.stride,
                     .count = piece.page_count}}};
  const CopyJob job{.direction = CopyJob::Direction::gather,
                    .batches = selection_.batches,
                    .slot = slot.memory,
                    .stamp = {.lease = lease.id,
                              .generation = slot.generation,
                              .chunk = slot.piece,
                              .payload_bytes = payload},
                    .checksum = options_.checksum,
                    .after = chunk.ready};
  if (Status taken = thread_->engine().submit(job, slot); !taken) {
    free_slot(slot);
    end_lease(lease, std::move(taken), Tell::yes);
    return false;
  }
  slot.room = lease.room->id;
  ++lease.room->gathering;
  lease.pieces.push_back({slot.index, slot.generation, payload, false});
  ++lease.slots;
  ++lease.gathering;
  ++lease.unreleased;
  ++lease.peer->slots;
  return true;
}

void PrefillRank::Impl::slot_gathered(std::uint32_t index, Status status) noexcept {
  SlotTable::Slot& slot = (*slots_)[index];
  Room& room = *rooms_.at(slot.room);  // it cannot end while its pages are read
  --room.gathering;
  if (slot.lease == 0) {  // its lease ended meanwhile
    free_slot(slot);
    end_room_if_idle(room);
    return pump();
  }
  Lease& lease = *leases_.at(slot.lease);
  --lease.gathering;
  if (!status) {
    slot.state = SlotTable::State::gathered;  // so that ending the lease frees it
    end_lease(lease, std::move(status), Tell::yes);
    return pump();
  }
  slot.state = SlotTable::State::gathered;
  announce(lease);
  finish_if_drained(lease);
}

// Exposes what is gathered, in the order of the pieces, whatever the order in which gathers end.
void PrefillRank::Impl::announce(Lease& lease) {
  for (; lease.announced < lease.pieces.size(); ++lease.announced) {
    SlotTable::Slot& slot = (*slots_)[lease.pieces[lease.announced].slot];
    if (slot.state != SlotTable::State::gathered) return;
    slot.state = SlotTable::State::exposed;
    slot.exposed_at = now();
    counters::add(stats_.pieces_sent);
    counters::add(stats_.bytes_sent, slot.ready.payload_bytes);
    (void)lease.peer->connection->send(slot.ready);
  }
}

void PrefillRank::Impl::free_slot(SlotTable::Slot& slot) {
  slots_->give_back(slot);
  counters::subtract(stats_.slots_in_use);
}

void PrefillRank::Impl::on_release(Peer& peer, wire::Release& release) {
  if (release.slot >= slots_->size()) {
    return refuse(peer,
                  Error{ErrorCode::invalid_argument,
                        fmt::format("RELEASE of slot {} of {}", release.slot, slots_->size())});
  }
  const auto found = peer.leases.find(release.pull);
  if (found == peer.leases.end()) {  // the lease ended while the release was on its way
    counters::add(stats_.late_messages);
    return;
  }
  Lease& lease = *leases_.at(found->second);
  SlotTable::Slot& slot = (*slots_)[release.slot];
  if (slot.lease != lease.id || slot.generation != release.generation ||
      slot.piece != release.piece || slot.state != SlotTable::State::exposed) {
    return refuse(
        peer, Error{ErrorCode::invalid_argument,
                    fmt::format(
                        "RELEASE of piece {} in slot {} generation {}, which pull {} does not hold",
                        release.piece, release.slot, release.generation, release.pull)});
  }
  lease.pieces[slot.piece].released = true;
  --lease.unreleased;
  --lease.slots;
  --peer.slots;
  free_slot(slot);
  enqueue(lease);
  unpark(peer);
  pump();
}

// Why a COMMIT cannot be VALID; empty when it is.
std::string PrefillRank::Impl::commit_problem(const Lease& lease,
                                              const wire::Commit& commit) const {
  if (!lease.last_sent) return "the last piece was not sent yet";
  if (lease.unreleased > 0) return fmt::format("{} pieces were not released", lease.unreleased);
  if (commit.pieces != lease.pieces.size())
    return fmt::format("{} pieces were sent, {} committed", lease.pieces.size(), commit.pieces);
  wire::PieceDigest digest;
  for (std::uint64_t i = 0; i < lease.pieces.size(); ++i) {
    const Lease::SentPiece& piece = lease.pieces[i];
    digest.add(i, piece.slot, piece.generation, piece.payload_bytes);
  }
  if (digest.value() != commit.digest)
    return fmt::format("digest {:016x} committed, {:016x} sent", commit.digest, digest.value());
  return {};
}

void PrefillRank::Impl::on_commit(Peer& peer, wire::Commit& commit) {
  const auto found = peer.leases.find(commit.pull);
  if (found == peer.leases.end()) {  // poisoned, aborted, or never ours
    counters::add(stats_.stale_commits);
    counters::add(stats_.late_messages);
    (void)peer.connection->send(wire::Verdict{commit.pull, false, "the lease has ended"});
    return;
  }
  Lease& lease = *leases_.at(found->second);
  std::string problem = commit_problem(lease, commit);
  const bool valid = problem.empty();
  (void)peer.connection->send(wire::Verdict{commit.pull, valid, problem});
  if (!valid) counters::add(stats_.stale_commits);
  end_lease(lease, valid ? Status{} : Status{Error{ErrorCode::data_loss, std::move(problem)}},
            Tell::no);
  pump();
}

void PrefillRank::Impl::on_abort(Peer& peer, wire::Abort& abort) {
  if (const auto found = peer.leases.find(abort.pull); found != peer.leases.end()) {
    end_lease(*leases_.at(found->second), std::move(abort.error), Tell::no);
    return pump();
  }
  if (const auto found = peer.waiting.find(abort.pull); found != peer.waiting.end()) {
    // The room need not wait for this puller when it is opened.
    if (++given_up_[found->second] == 1) given_up_order_.push_back(found->second);
    if (given_up_order_.size() > kMaxEndedRooms) {
      given_up_.erase(given_up_order_.front());
      given_up_order_.pop_front();
    }
    return stop_waiting(peer, abort.pull);
  }
  counters::add(stats_.late_messages);
}

void PrefillRank::Impl::stop_waiting(Peer& peer, std::uint64_t pull) {
  const auto room = peer.waiting.find(pull);
  const auto found = waiting_.find(room->second);
  peer.waiting.erase(room);
  std::erase_if(found->second, [&](const WaitingPull& waiting) {
    return waiting.peer == peer.id && waiting.pull.pull == pull;
  });
  if (found->second.empty()) waiting_.erase(found);
  counters::subtract(stats_.pulls_waiting);
}

// ---- time ------------------------------------------------------------------------------------------

// Whatever waits is looked at here, each on its own clock, whether or not new work comes.
void PrefillRank::Impl::sweep() {
  const TimePoint time = now();
  const Duration interval = std::min<Duration>(options_.heartbeat, options_.peer_timeout) / 4;
  if (time - std::exchange(swept_, time) > options_.heartbeat) {
    // This thread did not run for a while. What came meanwhile is read before anyone is judged.
    thread_->loop().at(time, [this] { sweep(); });
    return;
  }

  std::vector<std::shared_ptr<Peer>> lost;
  for (auto& [id, peer] : peers_) {
    const TimePoint heard = peer->welcomed ? peer->connection->last_received() : peer->connected_at;
    if (time - heard > options_.peer_timeout) {
      lost.push_back(peer);
    } else if (peer->welcomed && time >= peer->ping_due) {
      peer->ping_due = time + options_.heartbeat;
      (void)peer->connection->send(wire::Ping{++peer->pings});
    }
  }
  for (const auto& peer : lost) {
    lose_peer(*peer, Error{ErrorCode::unavailable, fmt::format("silent for more than {} ms",
                                                               options_.peer_timeout.count())});
  }

  for (SlotTable::Slot& slot : *slots_) {
    if (slot.state != SlotTable::State::exposed || slot.lease == 0 ||
        time - slot.exposed_at <= options_.slot_timeout)
      continue;
    counters::add(stats_.late_reads);
    end_lease(*leases_.at(slot.lease),
              Error{ErrorCode::data_loss,
                    fmt::format("slot {} was not released within {} ms and was taken back",
                                slot.index, options_.slot_timeout.count())},
              Tell::yes);
  }

  std::vector<Lease*> overdue;
  for (auto& [id, lease] : leases_) {
    if (time >= lease->deadline) overdue.push_back(lease.get());
  }
  for (Lease* lease : overdue) {
    end_lease(
        *lease,
        Error{ErrorCode::deadline_exceeded, fmt::format("the pull was not committed within {} ms",
                                                        options_.pull_timeout.count())},
        Tell::yes);
  }

  std::vector<Room*> expired;
  for (auto& [id, room] : rooms_) {
    if (room->unclaimed > 0 && time >= room->expires) expired.push_back(room.get());
  }
  for (Room* room : expired) {
    if (room->status) {
      room->status =
          Error{ErrorCode::deadline_exceeded, fmt::format("{} pullers did not come within {} ms",
                                                          room->unclaimed, options_.lease.count())};
    }
    room->unclaimed = 0;
    end_room_if_idle(*room);
  }

  for (auto it = waiting_.begin(); it != waiting_.end();) {
    std::erase_if(it->second, [&](const WaitingPull& waiting) {
      if (time < waiting.deadline) return false;
      Peer& peer = *peers_.at(waiting.peer);
      peer.waiting.erase(waiting.pull.pull);
      counters::subtract(stats_.pulls_waiting);
      (void)peer.connection->send(wire::Abort{
          waiting.pull.pull, Error{ErrorCode::deadline_exceeded,
                                   fmt::format("room {} was not opened within {} ms",
                                               index(waiting.pull.room), waiting.pull.wait_ms)}});
      return true;
    });
    it = it->second.empty() ? waiting_.erase(it) : std::next(it);
  }

  pump();
  thread_->loop().at(time + interval, [this] { sweep(); });
}

void PrefillRank::Impl::close() noexcept {
  {
    std::unique_lock lock{front_mutex_};
    if (!started_) return;
    if (!closing_) {
      closing_ = true;
      post([this] { begin_close(); });
    }
    closed_changed_.wait(lock, [this] { return closed_; });
  }
  thread_->stop();
}

void PrefillRank::Impl::begin_close() {
  draining_ = true;
  close_deadline_ = SteadyClock::instance().now() + kCloseDeadline;
  const Error reason{ErrorCode::unavailable, "the prefill rank is closing"};
  std::vector<RoomId> rooms;
  for (const auto& [id, room] : rooms_) rooms.push_back(id);
  for (const RoomId room : rooms) abort_room(room, reason);
  std::vector<std::shared_ptr<Peer>> peers;
  for (auto& [id, peer] : peers_) peers.push_back(peer);
  for (const auto& peer : peers) {
    (void)peer->connection->send(wire::Bye{reason});
    peer->connection->flush_and_close();
    lose_peer(*peer, reason);
  }
  finish_close();
}

// Waits, turn by turn, for the gathers that still read pages.
void PrefillRank::Impl::finish_close() {
  if (thread_->engine().in_flight() > 0 && SteadyClock::instance().now() < close_deadline_)
    return post([this] { finish_close(); });
  if (thread_->engine().in_flight() > 0)
    log::error("closed with {} gathers in flight", thread_->engine().in_flight());
  listener_.reset();
  const MutexLock lock{front_mutex_};
  closed_ = true;
  closed_changed_.notify_all();
}

// ---- the public class ------------------------------------------------------------------------------

PrefillRank::PrefillRank(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
PrefillRank::~PrefillRank() = default;
GroupMember PrefillRank::member() const {
  return impl_->member();
}
RankAnnouncement PrefillRank::announcement() const {
  return impl_->announcement();
}
Status PrefillRank::open(RoomId room, std::uint32_t pullers) {
  return impl_->open(room, pullers);
}
Status PrefillRank::publish(RoomId room, const Chunk& chunk) {
  return impl_->publish(room, chunk);
}
Status PrefillRank::abort(RoomId room, std::string reason) {
  return impl_->abort(room, std::move(reason));
}
std::size_t PrefillRank::poll(std::span<RoomEvent> events) {
  return impl_->poll(events);
}
int PrefillRank::event_fd() const noexcept {
  return impl_->event_fd();
}
PrefillStats PrefillRank::stats() const {
  return impl_->stats();
}
void PrefillRank::close() noexcept {
  impl_->close();
}

}  // namespace kvshard
