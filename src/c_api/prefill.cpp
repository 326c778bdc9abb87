#include <utility>

#include "c_api/boundary.hpp"
#include "c_api/pools.hpp"
#include "c_api/prefill_handle.hpp"

using namespace kvshard;
using namespace kvshard::c_api;

namespace {

Result<PrefillOptions> to_options(const kvshard_prefill_options& from) {
  PrefillOptions made;
  KVSHARD_TRY(made.pool, to_pool(from.pool));
  made.shard_rank = from.shard_rank;
  set_option(made.shard_size, from.shard_size);
  made.group = text_or(from.group, made.group.c_str());
  set_option(made.epoch, from.epoch);
  made.listen_host = text_or(from.listen_host, made.listen_host.c_str());
  KVSHARD_TRY(made.listen_port, to_port(from.listen_port));
  set_option(made.slot_payload_bytes, from.slot_payload_bytes);
  set_option(made.mapped_piece_bytes, from.mapped_piece_bytes);
  set_option(made.slots, from.slots);
  set_option(made.max_rooms, from.max_rooms);
  made.exported = from.not_exported == 0;
  made.checksum = from.checksum != 0;
  made.security.secret_file = text_or(from.secret_file, "");
  made.security.allow_unauthenticated_network = from.allow_unauthenticated_network != 0;
  set_option(made.lease, from.lease_ms);
  set_option(made.slot_timeout, from.slot_timeout_ms);
  set_option(made.pull_timeout, from.pull_timeout_ms);
  set_option(made.heartbeat, from.heartbeat_ms);
  set_option(made.peer_timeout, from.peer_timeout_ms);
  set_option(made.busy_poll, from.busy_poll_us);
  if (from.limits == nullptr) return made;

  KVSHARD_TRY(const auto limits, read(from.limits, "kvshard_control_limits"));
  set_option(made.limits.max_peers, limits.max_peers);
  set_option(made.limits.max_peers_per_address, limits.max_peers_per_address);
  set_option(made.limits.max_handshakes, limits.max_handshakes);
  set_option(made.limits.max_handshakes_per_address, limits.max_handshakes_per_address);
  set_option(made.limits.max_pulls_per_peer, limits.max_pulls_per_peer);
  set_option(made.limits.max_waiting_pulls, limits.max_waiting_pulls);
  set_option(made.limits.handshake_timeout, limits.handshake_timeout_ms);
  set_option(made.limits.max_queued_bytes, limits.max_queued_bytes);
  return made;
}

}  // namespace

int32_t kvshard_prefill_create(const kvshard_prefill_options* options, kvshard_prefill_rank** rank,
                               kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(const auto given, read(options, "kvshard_prefill_options"));
    KVSHARD_TRY(PrefillOptions made, to_options(given));
    KVSHARD_TRY(Backend backend, make_backend(given.backend));
    KVSHARD_TRY(auto created, PrefillRank::create(std::move(made), std::move(backend.transport),
                                                  std::move(backend.engine)));
    *rank = new kvshard_prefill_rank{std::move(created)};
    return {};
  });
}

void kvshard_prefill_destroy(kvshard_prefill_rank* rank) {
  delete rank;
}

int32_t kvshard_prefill_close(kvshard_prefill_rank* rank, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    rank->rank->close();
    return {};
  });
}

int32_t kvshard_prefill_member(const kvshard_prefill_rank* rank, kvshard_group_member* member,
                               kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(const auto to, to_fill(member, "kvshard_group_member"));
    write(from_member(rank->rank->member()), member, to.size);
    return {};
  });
}

int32_t kvshard_prefill_open(kvshard_prefill_rank* rank, uint64_t room, uint32_t pullers,
                             kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    return rank->rank->open(RoomId{room}, pullers);
  });
}

int32_t kvshard_prefill_publish(kvshard_prefill_rank* rank, uint64_t room,
                                const kvshard_chunk* chunk, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(const auto from, read(chunk, "kvshard_chunk"));
    KVSHARD_TRY(const auto pages, to_pages<LogicalPage>(from.pages, from.page_count));
    KVSHARD_TRY(required_array(from.side_data, from.side_data_bytes, "side_data"));
    return rank->rank->publish(
        RoomId{room},
        {.pages = pages,
         .first_position = from.first_position,
         .first_layer = from.first_layer,
         .layer_count = from.layer_count,
         .ready = static_cast<EventHandle>(from.ready),
         .table = from.table,
         .last = from.last != 0,
         .side_data = {static_cast<const std::byte*>(from.side_data), from.side_data_bytes}});
  });
}

int32_t kvshard_prefill_abort(kvshard_prefill_rank* rank, uint64_t room, const char* reason,
                              kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    return rank->rank->abort(RoomId{room}, text_or(reason, ""));
  });
}

int32_t kvshard_prefill_poll(kvshard_prefill_rank* rank, kvshard_room_event* event, bool* found,
                             kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(required(found, "found"));
    KVSHARD_TRY(auto to, to_fill(event, "kvshard_room_event"));
    RoomEvent ended;
    *found = rank->rank->poll({&ended, 1}) == 1;
    if (!*found) return {};
    to.room = index(ended.room);
    kvshard_error outcome{};
    to.code = report(ended.status, &outcome);
    copy_text(outcome.message, to.message, sizeof to.message);
    write(to, event, to.size);
    return {};
  });
}

int kvshard_prefill_event_fd(const kvshard_prefill_rank* rank) {
  return rank != nullptr ? rank->rank->event_fd() : -1;
}

int32_t kvshard_prefill_get_stats(const kvshard_prefill_rank* rank, kvshard_prefill_stats* stats,
                                  kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(auto to, to_fill(stats, "kvshard_prefill_stats"));
    const PrefillStats from = rank->rank->stats();
    to.rooms_opened = from.rooms_opened;
    to.rooms_done = from.rooms_done;
    to.rooms_failed = from.rooms_failed;
    to.pulls_started = from.pulls_started;
    to.pulls_committed = from.pulls_committed;
    to.pulls_failed = from.pulls_failed;
    to.pieces_sent = from.pieces_sent;
    to.bytes_sent = from.bytes_sent;
    to.late_reads = from.late_reads;
    to.stale_commits = from.stale_commits;
    to.late_messages = from.late_messages;
    to.peers_refused = from.peers_refused;
    to.peers_lost = from.peers_lost;
    to.handshakes_ended = from.handshakes_ended;
    to.rooms = from.rooms;
    to.leases = from.leases;
    to.pulls_waiting = from.pulls_waiting;
    to.slots_in_use = from.slots_in_use;
    to.peers = from.peers;
    write(to, stats, to.size);
    return {};
  });
}
