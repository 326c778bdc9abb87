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

}  // namespace kvshard
