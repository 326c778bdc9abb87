#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/assert.hpp"
#include "base/log.hpp"
#include "base/try.hpp"
#include "kvshard/metrics.hpp"
#include "session/prefill_impl.hpp"
#include "session/time_limits.hpp"

namespace kvshard {

namespace {

constexpr std::chrono::milliseconds kCloseDeadline{2'000};

}  // namespace

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
                           {"handshake_timeout", options.limits.handshake_timeout},
                           {"heartbeat", options.heartbeat},
                           {"peer_timeout", options.peer_timeout}},
                          options.heartbeat, options.peer_timeout));
  KVSHARD_TRY(check_busy_poll(options.busy_poll));
  for (const BufferGroup& group : options.pool.geometry.groups) {
    if (group.layers > 0 && group.page_bytes() > options.slot_payload_bytes) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("slot_payload_bytes {} holds no page of group {}, {} bytes",
                               options.slot_payload_bytes, group.name, group.page_bytes())};
    }
  }
  auto impl = std::make_unique<Impl>(std::move(options),
                                     clock != nullptr ? *clock : SteadyClock::instance());
  KVSHARD_TRY(impl->start(std::move(transport), std::move(engine)));
  return std::unique_ptr<PrefillRank>{new PrefillRank{std::move(impl)}};
}

Result<std::vector<PrefillRank::Impl::OwnTable>> PrefillRank::Impl::own_tables(
    const Geometry& geometry) {
  std::vector<OwnTable> tables;
  for (const BufferGroup& group : geometry.groups) {
    const auto known = std::ranges::find(tables, group.table, &OwnTable::number);
    if (known != tables.end()) {
      known->page_count = std::min(known->page_count, group.page_count);
      known->layers = std::max(known->layers, group.all_layers());
      continue;
    }
    const bool by_page = group.stripe() == group.page_size;
    KVSHARD_TRY(const auto layout, PageLayout::create(by_page ? group.parts : 1, group.page_size));
    KVSHARD_TRY(const auto filter, SendFilter::create(layout, by_page ? group.part : 0));
    tables.push_back({group.table, &group, filter, group.page_count, group.all_layers()});
  }
  return tables;
}

Status PrefillRank::Impl::start(std::unique_ptr<Transport> transport,
                                std::unique_ptr<CopyEngine> engine) {
  KVSHARD_TRY(own_tables_, own_tables(options_.pool.geometry));
  KVSHARD_TRY(const auto address, SocketAddress::parse(options_.listen_host, options_.listen_port));
  KVSHARD_TRY(authority_, Authority::create(options_.security));
  KVSHARD_TRY(authority_->check(address));
  KVSHARD_TRY(events_.open());
  slot_stride_ = (slot_bytes_for(options_.slot_payload_bytes) + 4095) / 4096 * 4096;
  KVSHARD_TRY(staging_memory_, make_staging_memory(engine->memory_kind(), engine->device(),
                                                   slot_stride_ * options_.slots));
  if (options_.exported) {
    auto made = export_pool(options_.pool, engine->memory_kind(), engine->device());
    if (made) {
      pool_export_ = std::move(made).value();
    } else {
      log::info("pages go through slots only: {}", made.error().message);
    }
  }
  KVSHARD_TRY(thread_, ProgressThread::create(std::move(transport), std::move(engine), clock_,
                                              options_.busy_poll));
  KVSHARD_TRY(staging_, thread_->transport().register_memory(staging_memory_->bytes(),
                                                             staging_memory_->kind()));
  KVSHARD_TRY(thread_->transport().serve(*staging_));
  slots_.emplace(*this, staging_memory_->bytes().data(), options_.slots, slot_stride_);
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

PrefillMetrics PrefillRank::Impl::metrics() const {
  const Counts counts = counters::snapshot(counts_);
  return {
      .group = options_.group,
      .shard_rank = options_.shard_rank,
      .shard_size = options_.shard_size,
      .stats = stats(),
      .stages = recorder_.stages(),
      .pulls = counts.pulls,
      .rooms = counts.rooms,
      .fragments = counts.fragments,
      .peers_connected = counts.peers_connected,
      .oldest_lease = std::chrono::nanoseconds{static_cast<std::int64_t>(counts.oldest_lease_ns)},
      .slots = options_.slots,
      .refused = recorder_.refused()};
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
    const auto [front, fresh] = front_.try_emplace(room);
    if (!fresh)
      return Error{ErrorCode::failed_precondition,
                   fmt::format("room {} is open already", index(room))};
    front->second.tables.resize(own_tables_.size());
    // Posted under the lock, so that the progress thread sees calls about a room in the order they took.
    post([this, room, pullers] { open_room(room, pullers); });
  }
  return {};
}

Status PrefillRank::Impl::publish(RoomId room, const Chunk& chunk) {
  const auto table = std::ranges::find(own_tables_, chunk.table, &OwnTable::number);
  if (table == own_tables_.end())
    return Error{ErrorCode::invalid_argument, fmt::format("no group has table {}", chunk.table)};
  if (chunk.first_layer > table->layers || chunk.layer_count > table->layers - chunk.first_layer ||
      (chunk.layer_count == 0 && chunk.first_layer != 0)) {
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("layers [{}, +{}) of {}", chunk.first_layer, chunk.layer_count, table->layers)};
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

  OwnedChunk owned{.table = &*table, .pages = {}};
  owned.pages.resize(table->filter.capacity(chunk.pages.size()));
  KVSHARD_TRY(const OwnedPages selected,
              table->filter.select(chunk.pages, Position{chunk.first_position}, owned.pages));
  owned.pages.resize(selected.pages.size());
  for (std::uint32_t i = 0; i < owned.pages.size(); ++i) {
    if (index(owned.pages[i]) >= table->page_count) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("page {} at position {} is local page {}, and the pool has {}",
                      index(chunk.pages[index(selected.position(i)) - chunk.first_position]),
                      index(selected.position(i)), index(owned.pages[i]), table->page_count)};
    }
  }
  owned.first_page = selected.positions.first / selected.positions.stride;
  owned.base = selected.base;
  owned.first_layer = chunk.first_layer;
  owned.layer_count = chunk.layer_count != 0 ? chunk.layer_count : table->layers;
  owned.ready = chunk.ready;

  const MutexLock lock{front_mutex_};
  const auto found = front_.find(room);
  if (found == front_.end())
    return Error{ErrorCode::failed_precondition,
                 fmt::format("room {} is not open, or has ended", index(room))};
  if (found->second.last)
    return Error{ErrorCode::failed_precondition,
                 fmt::format("room {} has its last chunk already", index(room))};
  FrontRoom::Table& front =
      found->second.tables[static_cast<std::size_t>(table - own_tables_.begin())];
  if (!chunk.pages.empty()) {
    if (front.base.value_or(selected.base) != selected.base) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format(
              "position {} continues a chain of base {}, what was published before has base {}",
              chunk.first_position, selected.base, *front.base)};
    }
    front.base = selected.base;
  }
  front.end_position = std::max(front.end_position, chunk.first_position + chunk.pages.size());
  found->second.last = chunk.last;
  std::optional<std::vector<wire::TableEnd>> ends;
  if (chunk.last) {
    ends.emplace();
    for (std::size_t i = 0; i < own_tables_.size(); ++i) {
      const FrontRoom::Table& end = found->second.tables[i];
      ends->push_back({own_tables_[i].number, end.base.value_or(0),
                       end.end_position * own_tables_[i].group->page_span()});
    }
  }
  post([this, room, owned = std::move(owned), ends = std::move(ends),
        side_data =
            std::vector<std::byte>{chunk.side_data.begin(), chunk.side_data.end()}]() mutable {
    add_chunk(room, std::move(owned), std::move(ends), std::move(side_data));
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

// ---- time ------------------------------------------------------------------------------------------

// Whatever waits is looked at here, each on its own clock, whether or not new work comes.
void PrefillRank::Impl::sweep() {
  const TimePoint time = now();
  const Duration interval = std::min<Duration>(options_.heartbeat, options_.peer_timeout) / 4;
  const Duration pause = pause_before(time, swept_, options_.heartbeat, "prefill");
  if (pause > Duration{0}) {
    for (auto& [id, peer] : peers_) peer->connection->excuse(pause);
  }

  std::vector<std::shared_ptr<Peer>> lost;
  for (auto& [id, peer] : peers_) {
    if (!peer->welcomed) continue;
    if (time - peer->connection->last_received() > options_.peer_timeout) {
      lost.push_back(peer);
    } else if (time >= peer->ping_due) {
      peer->ping_due = time + options_.heartbeat;
      (void)peer->connection->send(wire::Ping{++peer->pings});
    }
  }
  for (const auto& peer : lost) {
    lose_peer(*peer, Error{ErrorCode::unavailable, fmt::format("silent for more than {} ms",
                                                               options_.peer_timeout.count())});
  }
  while (const auto late = admission_.overdue(time)) {
    end_handshake(*late, {ErrorCode::deadline_exceeded,
                          fmt::format("its handshake took more than {} ms",
                                      options_.limits.handshake_timeout.count())});
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

  while (!by_age_.empty() && time >= by_age_.front()->deadline) {
    end_lease(
        *by_age_.front(),
        Error{ErrorCode::deadline_exceeded, fmt::format("the pull was not committed within {} ms",
                                                        options_.pull_timeout.count())},
        Tell::yes);
  }
  const Duration oldest = by_age_.empty() ? Duration{0} : time - by_age_.front()->claimed;
  std::atomic_ref{counts_.oldest_lease_ns}.store(
      static_cast<std::uint64_t>(std::max(oldest, Duration{0}).count()), std::memory_order_relaxed);

  while (!expiring_.empty() && time >= expiring_.front()->expires) {
    Room& room = *expiring_.front();
    expiring_.pop_front();
    room.expiring.reset();
    if (room.unclaimed == 0) continue;
    if (room.status) {
      room.status =
          Error{ErrorCode::deadline_exceeded, fmt::format("{} pullers did not come within {} ms",
                                                          room.unclaimed, options_.lease.count())};
    }
    room.unclaimed = 0;
    end_room_if_idle(room);
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
    thread_->wait(closed_changed_, lock, std::nullopt, [this] { return closed_; });
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
PrefillMetrics PrefillRank::metrics() const {
  return impl_->metrics();
}
void PrefillRank::close() noexcept {
  impl_->close();
}

}  // namespace kvshard
