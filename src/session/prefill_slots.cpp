#include <algorithm>

#include "base/assert.hpp"
#include "session/prefill_impl.hpp"

namespace kvshard {

void PrefillRank::Impl::enqueue(Lease& lease) {
  if (lease.queued) return;
  lease.queued = true;
  lease.queued_at = recorder_.now();
  run_queue_.push_back(lease.id);
}

// Moves a lease to its next piece; false when it has none now.
bool PrefillRank::Impl::advance(Lease& lease) {
  const std::vector<OwnedChunk>& chunks = lease.room->chunks;
  for (; lease.chunk < chunks.size(); ++lease.chunk, lease.chunk_begun = false) {
    if (!std::exchange(lease.chunk_begun, true)) begin_chunk(lease, chunks[lease.chunk]);
    for (; !lease.cutters.empty(); lease.cutters.pop_back()) {
      if (!lease.cutters.back().done()) return true;
    }
  }
  return false;
}

// What the lease wants of a chunk: by range of layers, first the rest of a unit that its first token
// splits, then whole units.
void PrefillRank::Impl::begin_chunk(Lease& lease, const OwnedChunk& chunk) const {
  const auto want = std::ranges::find(lease.wants, chunk.table->number,
                                      [](const Lease::Want& each) { return each.tokens.table; });
  if (want == lease.wants.end()) return;
  lease.want = &*want;
  if (!want->units) {
    want->units =
        want->table->tokens.units(chunk.table->group->phase(chunk.base), want->tokens.phase);
    want->range = want->units->range(want->tokens.first_token, want->tokens.end_token);
  }
  if (want->units->empty()) return;
  const std::uint64_t first = want->units->first_in_prefill_page(chunk.first_page);
  const std::uint64_t end =
      want->units->first_in_prefill_page(chunk.first_page + chunk.pages.size());
  const UnitList::Range& range = want->range;
  const auto layers =
      lease.peer->view->plan().layer_ranges(*want->table, chunk.first_layer, chunk.layer_count);
  // The last cutter runs first.
  for (auto buffers = layers.rbegin(); buffers != layers.rend(); ++buffers) {
    lease.cutters.emplace_back(std::max(first, range.first), std::min(end, range.end), std::nullopt,
                               buffers->first, buffers->second);
    if (range.skip && first < range.first && range.first <= end) {
      lease.cutters.emplace_back(range.first - 1, range.first, range.skip, buffers->first,
                                 buffers->second);
    }
  }
}

// The end of the stream: no piece is left and none can come.
void PrefillRank::Impl::finish_if_drained(Lease& lease) {
  if (lease.last_sent || lease.gathering > 0 || !lease.room->ends || advance(lease)) return;
  lease.last_sent = true;
  wire::Ready ready{.pull = lease.pull,
                    .lease = lease.id,
                    .piece = lease.pieces.size(),
                    .last = true,
                    .side_data = lease.room->side_data};
  for (const wire::TableEnd& end : *lease.room->ends) {
    if (lease.peer->view->plan().find_table(end.table) != nullptr) ready.tables.push_back(end);
  }
  (void)lease.peer->connection->send(ready);
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
  return std::max<std::size_t>(1,
                               slots_->size() / std::max<std::size_t>(1, counts_.peers_connected));
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
  const PoolView& view = *lease.peer->view;
  const Lease::Want& want = *lease.want;
  const Piece piece = lease.cutters.back().next(view, *want.table, lease.peer->capacity);
  const std::uint64_t payload = view.payload_bytes(*want.table, piece);
  const bool mapped = lease.peer->mapped;

  SlotTable::Slot& slot = slots_->take(lease.id, lease.pieces.size());
  counters::add(stats_.slots_in_use);
  slot.gathering_at = recorder_.now();
  slot.waited = slot.gathering_at - lease.queued_at;
  recorder_.time(Stage::slot, slot.waited);
  slot.ready = {.pull = lease.pull,
                .lease = lease.id,
                .piece = slot.piece,
                .slot = slot.index,
                .generation = slot.generation,
                .payload_bytes = payload,
                .first_buffer = piece.first_buffer,
                .buffer_count = piece.buffer_count,
                .base = chunk.base,
                .first_unit = piece.first_unit,
                .unit_count = piece.unit_count,
                .partial = piece.partial,
                .checksum = options_.checksum};
  if (mapped) {  // the slot stays empty, as a credit
    selection_.batches.clear();
    const UnitList& units = *want.units;
    const std::uint64_t first = units[piece.first_unit].prefill_page - chunk.first_page;
    const std::uint64_t last =
        units[piece.first_unit + piece.unit_count - 1].prefill_page - chunk.first_page;
    slot.ready.pages.assign(chunk.pages.begin() + static_cast<std::ptrdiff_t>(first),
                            chunk.pages.begin() + static_cast<std::ptrdiff_t>(last + 1));
  } else {
    view.select(*want.units, piece, chunk.pages, chunk.first_page, selection_);
    for (const FragmentBatch& batch : selection_.batches)
      counters::add(counts_.fragments, batch.fragments());
  }
  // A gather of nothing waits for the pages of a mapped pool, where they are not ready yet.
  const bool needs_gather = !mapped || !thread_->engine().fired(chunk.ready);
  slot.room = lease.room->id;
  if (needs_gather) {
    const CopyJob job{.direction = CopyJob::Direction::gather,
                      .batches = selection_.batches,
                      .slot = slot.memory,
                      .stamp = {.lease = lease.id,
                                .generation = slot.generation,
                                .chunk = slot.piece,
                                .payload_bytes = mapped ? 0 : payload},
                      .checksum = options_.checksum,
                      .after = chunk.ready};
    if (Status taken = thread_->engine().submit(job, slot); !taken) {
      free_slot(slot);
      end_lease(lease, std::move(taken), Tell::yes);
      return false;
    }
    ++lease.room->gathering;
    ++lease.gathering;
  }
  lease.pieces.push_back({slot.index, slot.generation, payload, false});
  ++lease.slots;
  ++lease.unreleased;
  ++lease.peer->slots;
  if (!needs_gather) {
    slot.state = SlotTable::State::gathered;
    announce(lease);
  }
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
  recorder_.record(slot_span(Stage::gather, slot, slot.gathering_at, recorder_.now()));
  announce(lease);
  finish_if_drained(lease);
}

Span PrefillRank::Impl::slot_span(Stage stage, const SlotTable::Slot& slot, TimePoint begin,
                                  TimePoint end) const {
  return {.stage = stage,
          .begin = begin,
          .end = end,
          .room = slot.room,
          .pull = slot.ready.pull,
          .source = options_.shard_rank,
          .lease = slot.ready.lease,
          .slot = slot.index,
          .piece = slot.piece,
          .bytes = slot.ready.payload_bytes,
          .waited = slot.waited};
}

// Exposes what is gathered, in the order of the pieces, whatever the order in which gathers end.
void PrefillRank::Impl::announce(Lease& lease) {
  for (; lease.announced < lease.pieces.size(); ++lease.announced) {
    SlotTable::Slot& slot = (*slots_)[lease.pieces[lease.announced].slot];
    if (slot.state != SlotTable::State::gathered) return;
    slot.state = SlotTable::State::exposed;
    slot.exposed_at = clock_.now();
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
  recorder_.record(slot_span(Stage::exposed, slot, slot.exposed_at, recorder_.now()));
  lease.pieces[slot.piece].released = true;
  --lease.unreleased;
  --lease.slots;
  --peer.slots;
  free_slot(slot);
  enqueue(lease);
  unpark(peer);
  pump();
}

}  // namespace kvshard
