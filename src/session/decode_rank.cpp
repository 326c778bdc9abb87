#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/assert.hpp"
#include "base/log.hpp"
#include "base/try.hpp"
#include "kvshard/metrics.hpp"
#include "session/decode_impl.hpp"
#include "session/time_limits.hpp"

namespace kvshard {

namespace {

constexpr std::chrono::milliseconds kCloseDeadline{2'000};
constexpr std::uint64_t kMaxProbeBytes = 1U << 20;

}  // namespace

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
  KVSHARD_TRY(check_busy_poll(options.busy_poll));
  if (options.landing_slots == 0 || options.window == 0) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("landing_slots {} and window {} must not be 0", options.landing_slots,
                             options.window)};
  }
  auto impl = std::make_unique<Impl>(std::move(options),
                                     clock != nullptr ? *clock : SteadyClock::instance());
  KVSHARD_TRY(impl->start(std::move(transport), std::move(engine)));
  return std::unique_ptr<DecodeRank>{new DecodeRank{std::move(impl)}};
}

Status DecodeRank::Impl::start(std::unique_ptr<Transport> transport,
                               std::unique_ptr<CopyEngine> engine) {
  KVSHARD_TRY(authority_, Authority::create(options_.security));
  KVSHARD_TRY(events_.open());
  for (const BufferGroup& group : options_.pool.geometry.groups) {
    const auto known = std::ranges::find(own_tables_, group.table, &OwnTable::number);
    if (known == own_tables_.end()) {
      own_tables_.push_back({group.table, &group, group.page_count, {}});
    } else {
      known->page_count = std::min(known->page_count, group.page_count);
    }
  }
  for (OwnTable& table : own_tables_) table.seen.resize(table.page_count);
  landing_stride_ = (slot_bytes_for(options_.landing_payload_bytes) + 4095) / 4096 * 4096;
  // One slot more, for probes: what they read is thrown away.
  KVSHARD_TRY(landing_memory_, make_staging_memory(engine->memory_kind(), engine->device(),
                                                   landing_stride_ * (options_.landing_slots + 1)));
  KVSHARD_TRY(thread_, ProgressThread::create(std::move(transport), std::move(engine), clock_,
                                              options_.busy_poll));
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
  for (const GroupMember& member : spec.members) {
    KVSHARD_TRY(const auto address, SocketAddress::parse(member.host, member.port));
    KVSHARD_TRY(authority_->check(address));
  }
  const auto until = std::chrono::steady_clock::now() + bounded(deadline);

  std::unique_lock lock{front_mutex_};
  if (closing_) return Error{ErrorCode::failed_precondition, "the rank is closed"};
  auto found = std::find_if(front_groups_.begin(), front_groups_.end(),
                            [&](const auto& entry) { return entry.second.spec == spec; });
  if (found == front_groups_.end()) {
    found = front_groups_.try_emplace(next_group_++).first;
    found->second.spec = spec;
    found->second.paths.resize(spec.members.size());
    found->second.counts.resize(spec.members.size());
    for (auto& counts : found->second.counts) counts = std::make_shared<SourceCounts>();
    post([this, id = GroupId{found->first}, spec, counts = found->second.counts] {
      add_group(id, spec, counts);
    });
  }
  const std::uint64_t id = found->first;
  FrontGroup& group = found->second;
  ++group.waiters;  // nobody erases the entry while it is above 0
  const bool in_time = thread_->wait(front_changed_, lock, until,
                                     [&] { return group.ready || group.refused || closing_; });
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

DecodeMetrics DecodeRank::Impl::metrics() const {
  const Counts counts = counters::snapshot(counts_);
  DecodeMetrics made{.stats = stats(),
                     .stages = recorder_.stages(),
                     .pulls = counts.pulls,
                     .fragments = counts.fragments,
                     .sessions = counts.sessions,
                     .bytes = counts.bytes,
                     .not_mapped = counts.not_mapped,
                     .emulated = counts.emulated,
                     .landing_bytes = counts.landing_bytes,
                     .landing_slots = options_.landing_slots,
                     .refused = recorder_.refused(),
                     .sources = {}};
  const MutexLock lock{front_mutex_};
  for (const auto& [id, group] : front_groups_) {
    for (std::uint32_t rank = 0; rank < group.counts.size(); ++rank) {
      const SourceCounts source = counters::snapshot(*group.counts[rank]);
      made.sources.push_back({.group = group.spec.name,
                              .epoch = group.spec.epoch,
                              .shard_rank = rank,
                              .connected = source.connected != 0,
                              .path = group.paths[rank],
                              .pieces = source.pieces,
                              .bytes = source.bytes,
                              .slowest = source.slowest,
                              .wait = source.wait,
                              .wire = source.wire});
    }
  }
  return made;
}

// Checks a table's destinations and takes them into the pull.
Status DecodeRank::Impl::place(Pull& pull, const PullPages& request) {
  const auto own = std::ranges::find(own_tables_, request.table, &OwnTable::number);
  if (own == own_tables_.end())
    return Error{ErrorCode::invalid_argument, fmt::format("no group has table {}", request.table)};
  if (pull.find_table(request.table) != nullptr)
    return Error{ErrorCode::invalid_argument, fmt::format("table {} twice", request.table)};
  const BufferGroup& group = *own->group;
  const bool by_page = group.stripe() == group.page_size;
  if (request.pages.size() > std::numeric_limits<std::uint32_t>::max() - request.first_position)
    return Error{ErrorCode::invalid_argument, "positions beyond 2^32"};
  const std::uint64_t end = request.end_position != 0
                                ? request.end_position
                                : request.first_position + request.pages.size();
  if (end < request.first_position || request.base >= group.parts ||
      request.skip_tokens >= group.page_span()) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("table {}: positions [{}, {}), base {} of {} parts, {} of {} tokens "
                             "skipped",
                             request.table, request.first_position, end, request.base, group.parts,
                             request.skip_tokens, group.page_span())};
  }
  // Positions of which this rank has the pages: every `step`-th from `phase` on.
  const std::uint32_t step = by_page ? group.parts : 1;
  const std::uint32_t phase = group.phase(request.base);
  const auto pages_before = [&](std::uint64_t position) {
    const std::uint64_t first = by_page ? phase : 0;
    return position > first ? (position - first - 1) / step + 1 : 0;
  };
  Pull::Table table{.own = &*own,
                    .pages = {request.pages.begin(), request.pages.end()},
                    .first_page = pages_before(request.first_position),
                    .phase = phase,
                    .first_token = request.first_position * group.page_span() + request.skip_tokens,
                    .end_token = end * group.page_span(),
                    .base = {},
                    .prefill_end = {}};
  if (table.pages.size() != pages_before(end) - table.first_page) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("table {}: {} pages for positions [{}, {}), of which this rank has {}",
                             request.table, table.pages.size(), request.first_position, end,
                             pages_before(end) - table.first_page)};
  }
  if (table.first_token > table.end_token) table.first_token = table.end_token;
  for (std::size_t i = 0; i < table.pages.size(); ++i) {
    const std::uint32_t page = index(table.pages[i]);
    if (page == 0 || page >= own->page_count || own->seen[page] == pull.id) {
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("destination page {} at position {} is {}", page,
                      (by_page ? phase : 0) + (table.first_page + i) * step,
                      page == 0                 ? "padding"
                      : page >= own->page_count ? fmt::format("not below {}", own->page_count)
                                                : "named twice")};
    }
    own->seen[page] = pull.id;
  }
  pull.tables.push_back(std::move(table));
  return {};
}

Result<PullId> DecodeRank::Impl::pull(const PullRequest& request) {
  if (request.after != nullptr && thread_->engine().memory_kind() != MemoryKind::cuda)
    return Error{ErrorCode::unsupported, "an event to wait for needs the CUDA copy engine"};
  auto pull = std::make_shared<Pull>();
  pull->room = request.room;
  pull->after = request.after;
  pull->listener = request.listener;
  pull->started = clock_.now();
  pull->deadline = pull->started + bounded(request.deadline);
  if (request.stream != nullptr) {
    KVSHARD_TRY(pull->gate, thread_->engine().hold(request.stream));
  }

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
  if (!request.pages.empty() ||
      std::ranges::find(own_tables_, 0U, &OwnTable::number) != own_tables_.end()) {
    KVSHARD_TRY(place(*pull, {.table = 0,
                              .pages = request.pages,
                              .first_position = request.first_position,
                              .skip_tokens = request.skip_tokens,
                              .end_position = request.end_position,
                              .base = request.base}));
  }
  for (const PullPages& pages : request.more_tables) KVSHARD_TRY(place(*pull, pages));
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

// ---- time ------------------------------------------------------------------------------------------

void DecodeRank::Impl::excuse(Duration pause) {
  for (auto& [id, group] : groups_) {
    for (auto& peer : group->peers) {
      if (peer->session != nullptr && peer->session->connection != nullptr)
        peer->session->connection->excuse(pause);
    }
  }
  for (Landing& landing : landings_) landing.started = std::min(landing.started + pause, swept_);
}

void DecodeRank::Impl::sweep() {
  const TimePoint time = now();
  const Duration interval = std::min<Duration>(options_.heartbeat, options_.peer_timeout) / 4;
  const Duration pause = pause_before(time, swept_, options_.heartbeat, "decode");
  if (pause > Duration{0}) excuse(pause);

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
      } else if (session->geometry && time >= session->ping_due) {
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
    thread_->wait(front_changed_, lock, std::nullopt, [this] { return closed_; });
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
  const auto ms = [](std::chrono::nanoseconds time) {
    return std::chrono::duration<double, std::milli>{time}.count();
  };
  std::string line =
      fmt::format("room {}: {}, {} bytes by {} from {} ranks in {:.3f} ms", index(event.room),
                  event.status ? "ok" : to_string(event.status.error().code), event.bytes,
                  to_string(event.path), event.sources.size(), ms(event.total));
  if (event.bytes > 0 && event.total.count() > 0) {
    line += fmt::format(" ({:.3g} GB/s)", static_cast<double>(event.bytes) /
                                              static_cast<double>(event.total.count()));
  }
  const auto slowest = std::ranges::max_element(event.sources, {}, &SourceTiming::landed);
  if (slowest != event.sources.end() && slowest->pieces > 0) {
    // What took most of its time; pieces overlap, so the sums may be longer than the pull.
    const std::pair<std::string_view, std::chrono::nanoseconds> parts[]{
        {"connect", event.connect},
        {"wait for its first piece", slowest->first_ready - event.connect},
        {"wait for landing slots", slowest->landing},
        {"wire", slowest->wire},
        {"scatter", slowest->scatter},
        {"commit", event.commit}};
    const auto most =
        std::ranges::max_element(parts, {}, [](const auto& part) { return part.second; });
    line += fmt::format(", slowest rank {}: landed after {:.3f} ms, most of it {} {:.3f} ms",
                        slowest->shard_rank, ms(slowest->landed), most->first, ms(most->second));
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
DecodeMetrics DecodeRank::metrics() const {
  return impl_->metrics();
}
void DecodeRank::close() noexcept {
  impl_->close();
}

}  // namespace kvshard
