#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "session/prefill_impl.hpp"

namespace kvshard {

namespace {

// Remembered, so that a late PULL is answered at once.
constexpr std::size_t kMaxEndedRooms = 16'384;

}  // namespace

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
      recorder_.record({.stage = Stage::room,
                        .begin = pull.arrived,
                        .end = recorder_.now(),
                        .room = id,
                        .pull = pull.pull.pull,
                        .source = options_.shard_rank});
      peer.waiting.erase(pull.pull.pull);
      claim(peer, *room, pull.pull);  // cannot end the room: its length is not known yet
    }
    pump();
  }
  if (const auto opened = rooms_.find(id); opened != rooms_.end())
    end_room_if_idle(*opened->second);
}

void PrefillRank::Impl::add_chunk(RoomId id, OwnedChunk chunk,
                                  std::optional<std::vector<wire::TableEnd>> ends,
                                  std::vector<std::byte> side_data) {
  const auto found = rooms_.find(id);
  if (found == rooms_.end()) return;  // ended meanwhile
  Room& room = *found->second;
  if (!chunk.pages.empty())
    room.chunks.push_back(std::move(chunk));  // a rank that owns nothing sends nothing
  if (ends) {
    room.ends = std::move(ends);
    room.side_data = std::move(side_data);
    room.expires = now() + options_.lease;
    room.expiring = expiring_.insert(expiring_.end(), &room);
    const std::vector<std::uint64_t> leases = room.leases;  // end_lease() edits the list
    for (const std::uint64_t lease_id : leases) {
      Lease& lease = *leases_.at(lease_id);
      if (Status fits = check_ends(lease); !fits) end_lease(lease, std::move(fits), Tell::yes);
      if (!rooms_.contains(id)) return;
    }
  }
  for (const std::uint64_t lease : room.leases) enqueue(*leases_.at(lease));
  pump();
}

// Whether the pull ends where the room does. The two may count in pages of unlike length: then the
// shorter one, made up to the other's pages, must be as long.
Status PrefillRank::Impl::check_ends(const Lease& lease) const {
  for (const Lease::Want& want : lease.wants) {
    const auto number = want.tokens.table;
    const auto end = std::ranges::find(*lease.room->ends, number, &wire::TableEnd::table);
    const auto group = std::ranges::find(lease.peer->geometry.groups, number, &BufferGroup::table);
    const auto own = std::ranges::find(own_tables_, number, &OwnTable::number);
    const std::uint64_t ours = end->end_token;
    const std::uint64_t theirs = want.tokens.end_token;
    const std::uint64_t apart = ours > theirs ? ours - theirs : theirs - ours;
    const std::uint64_t longer = ours > theirs ? own->group->page_span() : group->page_span();
    if (apart >= longer) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("room {} has {} tokens in table {}, the pull ends at {}",
                               index(lease.room->id), ours, number, theirs)};
    }
  }
  return {};
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

// Against the plan: every table of it once, and phases that exist.
Status PrefillRank::Impl::check_pull(const Peer& peer, const wire::Pull& pull) {
  const auto bad = [](std::string what) {
    return Error{ErrorCode::invalid_argument, "PULL: " + std::move(what)};
  };
  if (!peer.view) return bad("it came before ASSIGN");
  const auto tables = peer.view->plan().tables();
  if (tables.empty()) return bad("this rank was assigned nothing");
  for (const TransferPlan::Table& table : tables) {
    if (std::ranges::count(pull.tables, table.number, &wire::PullTable::table) != 1)
      return bad(fmt::format("table {} is not there once", table.number));
  }
  if (pull.tables.size() != tables.size())
    return bad(fmt::format("{} tables, {} were assigned", pull.tables.size(), tables.size()));
  for (const wire::PullTable& table : pull.tables) {
    const auto group = std::ranges::find(peer.geometry.groups, table.table, &BufferGroup::table);
    if (table.phase >= group->parts)
      return bad(
          fmt::format("table {}: phase {} of {} parts", table.table, table.phase, group->parts));
  }
  return {};
}

void PrefillRank::Impl::on_pull(Peer& peer, wire::Pull& pull) {
  const auto answer = [&](ErrorCode code, std::string message) {
    (void)peer.connection->send(wire::Abort{pull.pull, Error{code, std::move(message)}});
  };
  if (Status fits = check_pull(peer, pull); !fits) return refuse(peer, std::move(fits).error());
  if (peer.leases.contains(pull.pull) || peer.waiting.contains(pull.pull))
    return refuse(
        peer, Error{ErrorCode::invalid_argument, fmt::format("pull {} exists already", pull.pull)});
  if (const std::size_t pulls = peer.leases.size() + peer.waiting.size();
      pulls >= options_.limits.max_pulls_per_peer) {
    return answer(ErrorCode::resource_exhausted,
                  fmt::format("{} pulls of this peer are running or waiting, max_pulls_per_peer "
                              "is {}",
                              pulls, options_.limits.max_pulls_per_peer));
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
  if (stats_.pulls_waiting >= options_.limits.max_waiting_pulls) {
    return answer(ErrorCode::resource_exhausted,
                  fmt::format("{} pulls wait for their rooms, max_waiting_pulls is {}",
                              stats_.pulls_waiting, options_.limits.max_waiting_pulls));
  }
  counters::add(stats_.pulls_waiting);
  auto& waiting = waiting_[pull.room];
  waiting.push_back(
      {peer.id, pull, recorder_.now(), now() + std::chrono::milliseconds{pull.wait_ms}});
  peer.waiting.emplace(pull.pull, std::prev(waiting.end()));
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
  for (const wire::PullTable& table : pull.tables) {
    lease.wants.push_back({.tokens = table,
                           .table = peer.view->plan().find_table(table.table),
                           .units = {},
                           .range = {}});
  }
  lease.window = pull.window;
  lease.claimed = clock_.now();
  lease.deadline = now() + options_.pull_timeout;
  lease.by_age = by_age_.insert(by_age_.end(), &lease);
  leases_.emplace(id, std::move(made));
  peer.leases.emplace(pull.pull, id);
  room.leases.push_back(id);
  counters::add(stats_.pulls_started);
  counters::add(stats_.leases);
  if (room.ends) {
    if (Status fits = check_ends(lease); !fits) return end_lease(lease, std::move(fits), Tell::yes);
  }
  enqueue(lease);
}

// Every lease ends here, once. Slots that it still holds are taken back: at once when exposed (the next
// take() raises the generation before a byte changes), after its gather otherwise.
void PrefillRank::Impl::end_lease(Lease& lease, Status status, Tell tell) {
  if (tell == Tell::yes)
    (void)lease.peer->connection->send(wire::Abort{lease.pull, status.error()});
  Room& room = *lease.room;
  counters::add(counts_.pulls[end_code(status)]);
  const Span span{.stage = Stage::lease,
                  .begin = lease.claimed,
                  .end = recorder_.now(),
                  .room = room.id,
                  .pull = lease.pull,
                  .source = options_.shard_rank,
                  .lease = lease.id};
  if (status) {
    counters::add(stats_.pulls_committed);
    recorder_.record(span);
  } else {
    counters::add(stats_.pulls_failed);
    recorder_.trace(span);
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
  by_age_.erase(lease.by_age);
  leases_.erase(lease.id);
  unpark(peer);  // the lease may have held the peer's share, or been the one that was to use it
  end_room_if_idle(room);
}

void PrefillRank::Impl::end_room_if_idle(Room& room) {
  if (room.unclaimed > 0 || !room.leases.empty() || room.gathering > 0) return;
  const RoomId id = room.id;
  counters::add(room.status ? stats_.rooms_done : stats_.rooms_failed);
  counters::add(counts_.rooms[end_code(room.status)]);
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
  if (room.expiring) expiring_.erase(*room.expiring);
  rooms_.erase(id);
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
    const RoomId room = found->second->pull.room;
    if (++given_up_[room] == 1) given_up_order_.push_back(room);
    if (given_up_order_.size() > kMaxEndedRooms) {
      given_up_.erase(given_up_order_.front());
      given_up_order_.pop_front();
    }
    return stop_waiting(peer, abort.pull);
  }
  counters::add(stats_.late_messages);
}

void PrefillRank::Impl::stop_waiting(Peer& peer, std::uint64_t pull) {
  const auto waiting = peer.waiting.extract(pull).mapped();
  const auto room = waiting_.find(waiting->pull.room);
  room->second.erase(waiting);
  if (room->second.empty()) waiting_.erase(room);
  counters::subtract(stats_.pulls_waiting);
}

}  // namespace kvshard
