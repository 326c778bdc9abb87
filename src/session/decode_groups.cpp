#include <fmt/format.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/try.hpp"
#include "session/decode_impl.hpp"

namespace kvshard {

namespace {

// Trying again cannot help before somebody changes a configuration.
bool is_permanent(ErrorCode code) noexcept {
  return code == ErrorCode::failed_precondition || code == ErrorCode::invalid_argument ||
         code == ErrorCode::unsupported;
}

}  // namespace

void DecodeRank::Impl::add_group(GroupId id, const GroupSpec& spec,
                                 std::span<const std::shared_ptr<SourceCounts>> counts) {
  auto group = std::make_unique<Group>();
  group->id = id;
  group->spec = spec;
  group->peers.resize(spec.members.size());
  for (const GroupMember& member : spec.members) {
    auto peer = std::make_unique<Peer>();
    peer->group = group.get();
    peer->member = member;
    peer->counts = counts[member.shard_rank];
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
      counters::subtract(peer->counts->connected);
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
  auto connection = Connection::connect(thread_->loop(), *address, now() + options_.peer_timeout,
                                        session, {}, authority_->secrets());
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
      if (!session.geometry) return dispatch<wire::Welcome>(session, payload, &Impl::on_welcome);
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
  KVSHARD_TRY(check_compatible(welcome.geometry, options_.pool.geometry));
  const auto& known = peer.group->geometries;
  if (!known.empty() && known[peer.member.shard_rank] != welcome.geometry) {
    return Error{ErrorCode::failed_precondition,
                 fmt::format("geometry: rank {} holds another part of the model, or another pool, "
                             "than when the group was connected",
                             peer.member.shard_rank)};
  }
  return {};
}

void DecodeRank::Impl::on_welcome(Session& session, wire::Welcome& welcome) {
  if (Status fits = check_welcome(session, welcome); !fits)
    return refuse(session, std::move(fits).error());
  session.geometry = std::move(welcome.geometry);
  session.incarnation = welcome.incarnation;
  session.epoch = welcome.epoch;
  session.slot_count = welcome.slot_count;
  session.slot_stride = welcome.slot_stride;
  if (Status mapped = map(session, welcome); !mapped)
    return refuse(session, std::move(mapped).error());
  if (session.mapped != nullptr) return settled(session);
  auto endpoint = thread_->transport().connect(welcome.transport_address, welcome.staging, session);
  if (!endpoint) return refuse(session, std::move(endpoint).error());
  session.endpoint = std::move(endpoint).value();
  if (Status started = session.endpoint->probe(probe_memory_, session); !started)
    refuse(session, std::move(started).error());
}

// Maps the peer's pool where that is wanted and works. An error only where nothing else is wanted.
Status DecodeRank::Impl::map(Session& session, const wire::Welcome& welcome) {
  const MemoryKind memory = thread_->engine().memory_kind();
  if (options_.mapped == Mapped::never ||
      (options_.mapped == Mapped::automatic && memory == MemoryKind::host))
    return {};
  auto mapped = [&]() -> Result<std::unique_ptr<MappedPool>> {
    if (welcome.pool.empty())
      return Error{ErrorCode::unsupported, "the prefill rank does not export its pool"};
    return map_pool(welcome.pool, *session.geometry, memory, thread_->engine().device());
  }();
  if (mapped) {
    session.mapped = std::move(mapped).value();
    session.path = {.path = TransferPath::mapped,
                    .reason = std::string{session.mapped->description()}};
    return {};
  }
  if (options_.mapped == Mapped::always)
    return Error{ErrorCode::unsupported, "mapped: " + mapped.error().message};
  session.path.reason = "not mapped: " + mapped.error().message + "; ";
  counters::add(counts_.not_mapped);
  return {};
}

void DecodeRank::Impl::probed(Session& session, Status status) noexcept {
  if (session.lost) return;
  if (!status) {
    // A path that the options refuse stays refused; anything else may work next time.
    if (status.error().code == ErrorCode::unsupported)
      return refuse(session, std::move(status).error());
    return lose(session, std::move(status).error());
  }
  const std::string not_mapped = std::move(session.path.reason);
  session.path = session.endpoint->path();
  session.path.reason.insert(0, not_mapped);
  if (!session.path.get_native) counters::add(counts_.emulated);
  settled(session);
}

// The session knows how bytes will travel.
void DecodeRank::Impl::settled(Session& session) {
  session.probed = true;
  const Peer& peer = session.peer;
  Group& group = *peer.group;
  const PathReport& report = session.path;
  log::info("connected: group {} epoch {} shard {} at {}: path {}: {}", group.spec.name,
            group.spec.epoch, peer.member.shard_rank, session.connection->peer(),
            to_string(report.path), report.reason);
  {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(group.id));
        found != front_groups_.end()) {
      found->second.paths[peer.member.shard_rank] = report;
    }
  }
  assign(group, session);
}

// Who gives what is decided once, when every rank has said what it holds. `session` came last.
void DecodeRank::Impl::assign(Group& group, Session& session) {
  if (!group.lanes.empty()) return begin(session);
  std::vector<Geometry> geometries;
  for (const auto& peer : group.peers) {
    if (peer->session == nullptr || !peer->session->probed) return;
    geometries.push_back(*peer->session->geometry);
  }
  auto lanes = assign_lanes(geometries, options_.pool.geometry);
  if (!lanes) return refuse(session, std::move(lanes).error());
  group.geometries = std::move(geometries);
  group.lanes = std::move(lanes).value();
  for (const auto& peer : group.peers) {
    if (peer->session != nullptr) begin(*peer->session);
  }
}

// Tells a probed rank what it gives; from here on it can be pulled from.
void DecodeRank::Impl::begin(Session& session) {
  Peer& peer = session.peer;
  Group& group = *peer.group;
  const std::vector<Lane>& lanes = group.lanes[peer.member.shard_rank];
  auto plan = TransferPlan::create(*session.geometry, options_.pool.geometry, lanes);
  if (!plan) return refuse(session, std::move(plan).error());
  session.view.emplace(std::move(plan).value(), Side::decode, options_.pool);
  if (session.mapped != nullptr)
    session.mapped_view.emplace(session.view->plan(), Side::prefill, session.mapped->pool());
  (void)session.connection->send(wire::Assign{.lanes = lanes, .mapped = session.mapped != nullptr});
  if (peer.last_incarnation != 0) counters::add(stats_.reconnects);
  peer.last_incarnation = session.incarnation;
  peer.failed_attempts = 0;
  peer.ready = true;
  ++ready_sessions_;
  counters::add(stats_.peers);
  counters::add(peer.counts->connected);
  counters::add(counts_.sessions[static_cast<std::size_t>(session.path.path)]);
  if (!group.ready()) return;
  {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(group.id));
        found != front_groups_.end()) {
      found->second.ready = true;
      found->second.refused.reset();
    }
    front_changed_.notify_all();
  }
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
    counters::subtract(peer.counts->connected);
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
  recorder_.refuse(error, !session.peer.ready);
  lose(session, std::move(error));
}

void DecodeRank::Impl::on_bye(Session& session, wire::Bye& bye) {
  connection_lost(session, std::move(bye.error));
}

// A peer that said why, or that could not prove itself: connect() need not wait for another attempt.
void DecodeRank::Impl::connection_lost(Session& session, Error error) noexcept {
  if (session.lost) return;
  if (!session.peer.ready && is_permanent(error.code)) {
    const MutexLock lock{front_mutex_};
    if (const auto found = front_groups_.find(static_cast<std::uint64_t>(session.peer.group->id));
        found != front_groups_.end()) {
      found->second.refused = error;
    }
    front_changed_.notify_all();
  }
  lose(session, std::move(error));
}

}  // namespace kvshard
