#include <fmt/format.h>

#include "base/log.hpp"
#include "base/try.hpp"
#include "session/prefill_impl.hpp"

namespace kvshard {

void PrefillRank::Impl::on_accept(UniqueFd fd, std::string name) {
  if (draining_) return;  // the socket closes
  const auto address = SocketAddress::remote(fd.get());
  if (!address) return;  // it has gone already
  auto peer = std::make_shared<Peer>(*this, next_peer_++, std::move(name));
  auto connection = Connection::adopt(thread_->loop(), std::move(fd), *peer,
                                      {.max_queued_bytes = options_.limits.max_queued_bytes},
                                      authority_->secrets());
  if (!connection) return;
  if (const auto oldest = admission_.arrive(peer->id, address->host(), now()))
    end_handshake(*oldest, {ErrorCode::resource_exhausted, "too many handshakes are in flight"});
  peer->connection = std::move(connection).value();
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
      case MessageType::assign:
        if (!peer.view) return dispatch<wire::Assign>(peer, payload, &Impl::on_assign);
        break;
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
  log_refusal(peer, error);
  (void)peer.connection->send(wire::Bye{error});
  peer.connection->flush_and_close();
  lose_peer(peer, std::move(error));
}

void PrefillRank::Impl::log_refusal(const Peer& peer, const Error& error) {
  counters::add(stats_.peers_refused);
  recorder_.refuse(error, !peer.view);
  if (const auto held_back = refusals_.pass(now())) {
    log::warning("peer refused: {}: {}{}", peer.name, error.message,
                 *held_back == 0 ? "" : fmt::format(" ({} lines like this held back)", *held_back));
  }
}

// What ends a handshake but for the peer's own will: a wrong secret, no kvshard peer at all.
void PrefillRank::Impl::connection_lost(Peer& peer, Error error) noexcept {
  if (!peer.welcomed && error.code != ErrorCode::unavailable) log_refusal(peer, error);
  lose_peer(peer, std::move(error));
}

void PrefillRank::Impl::end_handshake(std::uint64_t peer, Error error) {
  counters::add(stats_.handshakes_ended);
  lose_peer(*peers_.at(peer), std::move(error));
}

void PrefillRank::Impl::lose_peer(Peer& peer, Error error) noexcept {
  const auto found = peers_.find(peer.id);
  if (found == peers_.end()) return;
  const std::shared_ptr<Peer> keep = found->second;  // we may be inside one of its calls
  peers_.erase(found);
  admission_.leave(peer.id);
  counters::subtract(stats_.peers);
  if (peer.welcomed) {
    counters::subtract(counts_.peers_connected);
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
  return check_compatible(options_.pool.geometry, hello.geometry);
}

void PrefillRank::Impl::on_hello(Peer& peer, std::span<const std::byte> payload) {
  const auto versions = wire::decode_hello_prefix(payload);
  if (!versions) return refuse(peer, versions.error());
  if (const auto version = wire::choose_version(*versions); !version)
    return refuse(peer, version.error());
  auto hello = wire::decode<wire::Hello>(payload);
  if (!hello) return refuse(peer, std::move(hello).error());
  if (Status fits = check_hello(*hello); !fits) return refuse(peer, std::move(fits).error());
  if (Status room = admission_.establish(peer.id); !room)
    return refuse(peer, std::move(room).error());

  peer.geometry = std::move(hello->geometry);
  peer.capacity = std::min(options_.slot_payload_bytes, hello->landing_payload_bytes);
  peer.welcomed = true;
  counters::add(counts_.peers_connected);
  const auto address = thread_->transport().address();
  const auto staging = staging_->packed();
  const auto pool = pool_export_ != nullptr ? pool_export_->bytes() : std::span<const std::byte>{};
  (void)peer.connection->send(
      wire::Welcome{.version = wire::kProtocolVersion,
                    .incarnation = incarnation_,
                    .epoch = options_.epoch,
                    .shard_rank = options_.shard_rank,
                    .shard_size = options_.shard_size,
                    .geometry = options_.pool.geometry,
                    .transport_address = {address.begin(), address.end()},
                    .staging = {staging.begin(), staging.end()},
                    .pool = {pool.begin(), pool.end()},
                    .slot_count = options_.slots,
                    .slot_stride = slot_stride_,
                    .heartbeat_ms = static_cast<std::uint32_t>(options_.heartbeat.count())});
}

void PrefillRank::Impl::on_assign(Peer& peer, wire::Assign& assign) {
  if (assign.mapped && pool_export_ == nullptr)
    return refuse(peer, Error{ErrorCode::failed_precondition, "mapped: the pool was not exported"});
  peer.mapped = assign.mapped;
  if (peer.mapped) peer.capacity = options_.mapped_piece_bytes;
  auto plan = TransferPlan::create(options_.pool.geometry, peer.geometry, assign.lanes);
  if (!plan) return refuse(peer, std::move(plan).error());
  for (std::uint32_t b = 0; b < plan->buffers(); ++b) {
    if (plan->unit_bytes(b, 1) <= peer.capacity) continue;
    return refuse(
        peer,
        Error{ErrorCode::failed_precondition,
              fmt::format("landing_payload_bytes: a page takes {} bytes, what decode can land "
                          "and prefill's slots hold is {}",
                          plan->unit_bytes(b, 1), peer.capacity)});
  }
  peer.view.emplace(std::move(plan).value(), Side::prefill, options_.pool);
}

}  // namespace kvshard
