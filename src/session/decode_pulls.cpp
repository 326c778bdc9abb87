#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/try.hpp"
#include "session/decode_impl.hpp"

namespace kvshard {

void DecodeRank::Impl::start_pull(std::shared_ptr<Pull> made) {
  Pull& pull = *made;
  pulls_.emplace(pull.id, std::move(made));
  pull.queued = clock_.now();
  recorder_.record({.stage = Stage::queue,
                    .begin = pull.started,
                    .end = pull.queued,
                    .room = pull.room,
                    .pull = pull.id});
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
  pull.sent = clock_.now();
  recorder_.record({.stage = Stage::connect,
                    .begin = pull.queued,
                    .end = pull.sent,
                    .room = pull.room,
                    .pull = pull.id});
  pull.parts.resize(pull.group->peers.size());
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(pull.deadline - now()).count();
  for (std::uint32_t rank = 0; rank < pull.parts.size(); ++rank) {
    Part& part = pull.parts[rank];
    part.timing.shard_rank = rank;
    if (!pull.group->gives(rank)) {
      part.last = part.committed = true;
      continue;
    }
    Session& session = *pull.group->peers[rank]->session;
    part.session = &session;
    pull.path = session.path.path;
    session.pulls.insert(pull.id);
    wire::Pull message{.pull = pull.id,
                       .room = pull.room,
                       .window = options_.window,
                       .wait_ms = static_cast<std::uint32_t>(std::clamp<std::int64_t>(
                           left, 0, std::numeric_limits<std::uint32_t>::max()))};
    for (const TransferPlan::Table& table : session.view->plan().tables()) {
      const Pull::Table* const wanted = pull.find_table(table.number);
      message.tables.push_back({.table = table.number});
      if (wanted == nullptr) continue;  // nothing of it: right when the room has nothing either
      message.tables.back().phase = wanted->phase;
      message.tables.back().first_token = wanted->first_token;
      message.tables.back().end_token = wanted->end_token;
    }
    (void)session.connection->send(message);
  }
  commit_if_complete(pull);  // there may be nothing that any rank gives
}

namespace {
Error bad_ready(std::uint64_t pull, std::string_view what) {
  return Error{ErrorCode::invalid_argument, fmt::format("READY of pull {}: {}", pull, what)};
}
}  // namespace

// What a rank's part of a table consists of, now that it says which chain it sends.
Result<DecodeRank::Impl::Part::Tokens*> DecodeRank::Impl::tokens_of(
    const Session& session, Pull& pull, Part& part, const TransferPlan::Table& table,
    std::uint32_t base) {
  Pull::Table* const wanted = pull.find_table(table.number);
  if (wanted == nullptr)
    return bad_ready(pull.id, fmt::format("table {} was not asked for", table.number));
  const auto group = std::ranges::find(session.geometry->groups, table.number, &BufferGroup::table);
  if (base >= group->parts)
    return bad_ready(pull.id, fmt::format("base {} of {} parts", base, group->parts));
  if (wanted->base.value_or(base) != base) {
    return bad_ready(pull.id, fmt::format("table {} has base {} on one rank and {} on another",
                                          table.number, *wanted->base, base));
  }
  wanted->base = base;
  auto known = std::ranges::find(part.tables, &table, &Part::Tokens::table);
  if (known == part.tables.end()) {
    UnitList units = table.tokens.units(group->phase(base), wanted->phase);
    const UnitList::Range range =
        units.empty() ? UnitList::Range{} : units.range(wanted->first_token, wanted->end_token);
    part.tables.push_back(
        {&table, std::move(units), {range, table.first_buffer, table.buffer_count}});
    known = part.tables.end() - 1;
  }
  return &*known;
}

// Checks a piece against what was asked for, and notes it.
Status DecodeRank::Impl::take_piece(Session& session, Pull& pull, Part& part,
                                    const wire::Ready& ready) {
  if (part.unreleased >= options_.window)
    return bad_ready(pull.id, fmt::format("more than {} slots at once", options_.window));
  if (ready.slot >= session.slot_count)
    return bad_ready(pull.id, fmt::format("slot {} of {}", ready.slot, session.slot_count));
  const TransferPlan& plan = session.view->plan();
  const auto table = std::ranges::find_if(plan.tables(), [&](const TransferPlan::Table& each) {
    return ready.first_buffer >= each.first_buffer &&
           ready.first_buffer < each.first_buffer + each.buffer_count;
  });
  if (table == plan.tables().end())
    return bad_ready(pull.id, fmt::format("buffer {} of {}", ready.first_buffer, plan.buffers()));
  KVSHARD_TRY(Part::Tokens* const tokens, tokens_of(session, pull, part, *table, ready.base));
  const Piece piece = piece_of(ready, *tokens, pull);
  if (!tokens->coverage.holds(piece)) {
    return bad_ready(
        pull.id, fmt::format("units [{}, +{}){} in buffers [{}, +{}) were not asked for",
                             ready.first_unit, ready.unit_count, ready.partial ? " in part" : "",
                             ready.first_buffer, ready.buffer_count));
  }
  const std::uint64_t payload = session.view->payload_bytes(*table, piece);
  if (payload != ready.payload_bytes)
    return bad_ready(pull.id, fmt::format("{} bytes for {} units, expected {}", ready.payload_bytes,
                                          ready.unit_count, payload));
  if (session.mapped != nullptr) {
    KVSHARD_TRY(check_mapped(session, *tokens, ready));
  } else if (payload > options_.landing_payload_bytes ||
             slot_bytes_for(payload) > session.slot_stride || !ready.pages.empty()) {
    return bad_ready(
        pull.id,
        fmt::format("{} bytes and {} pages for slots that hold {} here and {} there", payload,
                    ready.pages.size(), options_.landing_payload_bytes, session.slot_stride));
  }
  if (!tokens->coverage.mark(piece)) {
    return bad_ready(pull.id,
                     fmt::format("units [{}, +{}) came twice", ready.first_unit, ready.unit_count));
  }
  return {};
}

// The peer's pages of a piece that is mapped: as many as its units need, all of them in the mapping.
Status DecodeRank::Impl::check_mapped(const Session& session, const Part::Tokens& tokens,
                                      const wire::Ready& ready) const {
  const std::uint64_t pages = tokens.units[ready.first_unit + ready.unit_count - 1].prefill_page -
                              tokens.units[ready.first_unit].prefill_page + 1;
  if (ready.pages.size() != pages)
    return bad_ready(ready.pull,
                     fmt::format("{} pages, its units are in {}", ready.pages.size(), pages));
  for (const BufferGroup& group : session.geometry->groups) {
    if (group.table != tokens.table->number) continue;
    for (const LocalPage page : ready.pages) {
      if (index(page) >= group.page_count)
        return bad_ready(ready.pull, fmt::format("page {} of {}", index(page), group.page_count));
    }
  }
  return {};
}

// The end of a rank's stream: it must say how long the room is, as the others do.
Status DecodeRank::Impl::take_last(Session& session, Pull& pull, Part& part, wire::Ready& ready) {
  for (const TransferPlan::Table& table : session.view->plan().tables()) {
    Pull::Table* const wanted = pull.find_table(table.number);
    if (wanted == nullptr) continue;
    const auto end = std::ranges::find(ready.tables, table.number, &wire::TableEnd::table);
    if (end == ready.tables.end())
      return bad_ready(pull.id, fmt::format("no end of table {}", table.number));
    if (wanted->prefill_end.value_or(end->end_token) != end->end_token) {
      return bad_ready(pull.id, fmt::format("table {} has {} tokens on one rank and {} on another",
                                            table.number, *wanted->prefill_end, end->end_token));
    }
    wanted->prefill_end = end->end_token;
    KVSHARD_TRY(const Part::Tokens* const tokens, tokens_of(session, pull, part, table, end->base));
    const std::uint64_t end_token = std::min(wanted->end_token, end->end_token);
    const std::uint64_t end_unit = tokens->units.empty() || end_token <= wanted->first_token
                                       ? 0
                                       : tokens->units.range(wanted->first_token, end_token).end;
    if (!tokens->coverage.complete(end_unit)) {
      return Error{ErrorCode::data_loss,
                   fmt::format("{} of {} (unit, buffer) pairs of table {} were sent",
                               tokens->coverage.marked(), tokens->coverage.expected(end_unit),
                               table.number)};
    }
  }
  part.last = true;
  part.side_data = std::move(ready.side_data);
  return {};
}

Piece DecodeRank::Impl::piece_of(const wire::Ready& ready, const Part::Tokens& tokens,
                                 const Pull& pull) {
  Piece piece{.first_unit = ready.first_unit,
              .unit_count = ready.unit_count,
              .partial = ready.partial,
              .first_buffer = ready.first_buffer,
              .buffer_count = ready.buffer_count};
  if (ready.partial) {
    const Pull::Table& table = *pull.find_table(tokens.table->number);
    piece.skip = tokens.units.range(table.first_token, table.end_token).skip.value_or(0);
  }
  return piece;
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
  if (part.last) return refuse(session, bad_ready(pull->id, "a piece after the last"));
  if (ready.piece != part.pieces.size()) {
    return refuse(session, bad_ready(pull->id, fmt::format("piece {}, expected {}", ready.piece,
                                                           part.pieces.size())));
  }
  const TimePoint arrived = clock_.now();
  if (!std::exchange(part.heard, true)) {
    recorder_.record({.stage = Stage::wait,
                      .begin = pull->sent,
                      .end = arrived,
                      .room = pull->room,
                      .pull = pull->id,
                      .source = rank,
                      .lease = ready.lease});
    if (options_.metrics) Recorder::add(session.peer.counts->wait, arrived - pull->sent);
  }
  if (ready.last) {
    if (Status fits = take_last(session, *pull, part, ready); !fits) {
      if (fits.error().code == ErrorCode::data_loss) return fail(*pull, std::move(fits).error());
      return refuse(session, std::move(fits).error());
    }
    return commit_if_complete(*pull);
  }
  if (Status fits = take_piece(session, *pull, part, ready); !fits)
    return refuse(session, std::move(fits).error());
  if (part.pieces.empty()) part.timing.first_ready = arrived - pull->started;
  part.pieces.push_back({ready.slot, ready.generation, ready.payload_bytes});
  ++part.unreleased;
  ready_.push_back({pull->id, rank, std::move(ready), arrived});
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
    landing.pull = piece.pull;
    landing.shard_rank = piece.shard_rank;
    landing.session = &session;
    landing.ready = std::move(piece.ready);
    landing.started = clock_.now();
    landing.waited = landing.started - piece.arrived;
    pull->parts[piece.shard_rank].timing.landing += landing.waited;
    recorder_.time(Stage::landing, landing.waited);
    counters::add(counts_.landing_bytes, landing.ready.payload_bytes);
    if (session.mapped != nullptr) {
      land(landing, *pull);
      continue;
    }
    landing.state = Landing::State::fetching;
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
  counters::subtract(counts_.landing_bytes, landing.ready.payload_bytes);
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
  landing.landed = clock_.now();
  record_wire(landing, *pull);
  release(landing, *pull);
  land(landing, *pull);
}

// The piece has travelled: from landing.started to landing.landed.
void DecodeRank::Impl::record_wire(const Landing& landing, Pull& pull) {
  const Duration wire = landing.landed - landing.started;
  pull.parts[landing.shard_rank].timing.wire += wire;
  recorder_.record(piece_span(Stage::wire, landing, pull));
  if (options_.metrics) Recorder::add(landing.session->peer.counts->wire, wire);
}

Span DecodeRank::Impl::piece_span(Stage stage, const Landing& landing, const Pull& pull) {
  return {.stage = stage,
          .begin = landing.started,
          .end = landing.landed,
          .room = pull.room,
          .pull = pull.id,
          .source = landing.shard_rank,
          .lease = landing.ready.lease,
          .slot = landing.index,
          .piece = landing.ready.piece,
          .bytes = landing.ready.payload_bytes,
          .waited = landing.waited};
}

// The peer may reuse the slot from here on: its bytes are ours. Whether they were valid is for COMMIT.
void DecodeRank::Impl::release(const Landing& landing, Pull& pull) {
  --pull.parts[landing.shard_rank].unreleased;
  (void)landing.session->connection->send(wire::Release{.pull = pull.id,
                                                        .piece = landing.ready.piece,
                                                        .slot = landing.ready.slot,
                                                        .generation = landing.ready.generation});
}

// Copies a piece into our pages: from the landing slot, or from the peer's pages.
void DecodeRank::Impl::land(Landing& landing, Pull& pull) {
  Session& session = *landing.session;
  const wire::Ready& ready = landing.ready;
  const Part& part = pull.parts[landing.shard_rank];
  const auto tokens = std::ranges::find_if(part.tables, [&](const Part::Tokens& each) {
    return ready.first_buffer >= each.table->first_buffer &&
           ready.first_buffer < each.table->first_buffer + each.table->buffer_count;
  });
  const Pull::Table& table = *pull.find_table(tokens->table->number);
  const Piece piece = piece_of(ready, *tokens, pull);
  session.view->select(tokens->units, piece, table.pages, table.first_page, selection_);
  CopyJob job{.direction = CopyJob::Direction::scatter,
              .batches = selection_.batches,
              .slot = landing.memory,
              .stamp = {.lease = ready.lease,
                        .generation = ready.generation,
                        .chunk = ready.piece,
                        .payload_bytes = ready.payload_bytes},
              .checksum = ready.checksum,
              .after = pull.after};
  if (session.mapped != nullptr) {
    session.mapped_view->select(tokens->units, piece, ready.pages,
                                tokens->units[ready.first_unit].prefill_page, source_selection_);
    job.direction = CopyJob::Direction::pull;
    job.sources = source_selection_.batches;
    job.slot = nullptr;
    job.checksum = false;
  }
  for (const FragmentBatch& batch : selection_.batches)
    counters::add(counts_.fragments, batch.fragments());
  landing.state = Landing::State::scattering;
  ++pull.scatters;
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
    const TimePoint end = clock_.now();
    const std::uint64_t bytes = landing.ready.payload_bytes;
    SourceCounts& counts = *landing.session->peer.counts;
    if (landing.session->mapped != nullptr) {
      landing.landed = end;
      record_wire(landing, pull);
      release(landing, pull);
    } else {
      Span span = piece_span(Stage::scatter, landing, pull);
      span.begin = landing.landed;
      span.end = end;
      span.waited = {};
      recorder_.record(span);
      part.timing.scatter += end - landing.landed;
    }
    ++part.landed;
    ++part.timing.pieces;
    part.timing.bytes += bytes;
    part.timing.landed = end - pull.started;
    counters::add(stats_.pieces);
    counters::add(stats_.bytes, bytes);
    counters::add(counts_.bytes[static_cast<std::size_t>(pull.path)], bytes);
    counters::add(counts.pieces);
    counters::add(counts.bytes, bytes);
    commit_if_complete(pull);
  }
  free_landing(landing);
  pump();
}

void DecodeRank::Impl::commit_if_complete(Pull& pull) {
  if (!std::all_of(pull.parts.begin(), pull.parts.end(),
                   [](const Part& part) { return part.complete(); }))
    return;
  pull.state = Pull::State::committing;
  pull.complete = clock_.now();
  for (const Part& part : pull.parts) {
    if (part.committed) continue;  // it gives nothing
    wire::PieceDigest digest;
    for (std::uint64_t i = 0; i < part.pieces.size(); ++i) {
      digest.add(i, part.pieces[i].slot, part.pieces[i].generation, part.pieces[i].payload_bytes);
    }
    (void)part.session->connection->send(wire::Commit{pull.id, part.pieces.size(), digest.value()});
  }
  finish_if_committed(pull);
}

void DecodeRank::Impl::finish_if_committed(Pull& pull) {
  if (std::ranges::all_of(pull.parts, &Part::committed)) finish(pull);
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
  finish_if_committed(*pull);
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

void DecodeRank::Impl::record_end(const Pull& pull, const PullEvent& event, TimePoint ended) {
  counters::add(counts_.pulls[end_code(event.status)]);
  Span span{.stage = Stage::pull,
            .begin = pull.started,
            .end = ended,
            .room = pull.room,
            .pull = pull.id};
  if (!event.status) return recorder_.trace(span);
  recorder_.record(span);
  span.stage = Stage::commit;
  span.begin = pull.complete;
  recorder_.record(span);
  const Part* first = nullptr;
  const Part* last = nullptr;
  for (const Part& part : pull.parts) {
    if (part.pieces.empty()) continue;
    if (first == nullptr || part.timing.landed < first->timing.landed) first = &part;
    if (last == nullptr || part.timing.landed >= last->timing.landed) last = &part;
  }
  if (first == last) return;  // one source, or none
  span.stage = Stage::skew;
  span.begin = pull.started + first->timing.landed;
  span.end = pull.started + last->timing.landed;
  span.source = last->timing.shard_rank;
  recorder_.record(span);
  counters::add(pull.group->peers[last->timing.shard_rank]->counts->slowest);
}

void DecodeRank::Impl::finish(Pull& pull) {
  const TimePoint ended = clock_.now();
  PullEvent event{.pull = PullId{pull.id},
                  .room = pull.room,
                  .status = std::move(pull.status),
                  .total = ended - pull.started,
                  .path = pull.path};
  if (!pull.parts.empty()) event.connect = pull.sent - pull.started;
  if (pull.state == Pull::State::committing) event.commit = ended - pull.complete;
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
  record_end(pull, event, ended);
  if (pull.group != nullptr && pull.parts.empty()) std::erase(pull.group->waiting, pull.id);
  PullListener* const listener = pull.listener;
  const std::unique_ptr<StreamGate> gate = std::move(pull.gate);  // opened last
  pulls_.erase(pull.id);
  {
    const MutexLock lock{front_mutex_};
    --live_pulls_;
  }
  if (listener != nullptr) return listener->pull_done(event);
  events_.push(std::move(event));
}

}  // namespace kvshard
