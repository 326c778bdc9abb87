#pragma once

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/try.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/tracer.hpp"

namespace kvshard::bench {

struct FleetOptions {
  std::uint32_t groups{1};
  std::uint32_t shard_size{64};
  std::uint32_t decode_ranks{1};
  std::uint32_t rooms{1'000};    ///< in flight at once
  std::uint32_t page_bytes{64};  ///< a multiple of 32
  TransportOptions transport{.kind = TransportOptions::Kind::loopback};
  bool metrics{true};
  std::shared_ptr<Tracer> tracer{};
  std::function<void()> turn{};  ///< moves the ranks, where they have no threads (ManualTurns)
};

/// Prefill groups and decode ranks in one process, with one page a rank and request. With small pages over the
/// loopback transport what is left is what a request costs, not its bytes.
///
/// A place holds one room at a time, [0, rooms): its pages on both sides are its own, and each of its
/// requests is a room of its own. What arrives is compared with the source and wiped.
/// Threads: one at a time.
class RoomFleet {
 public:
  static Result<std::unique_ptr<RoomFleet>> create(const FleetOptions& options) {
    std::unique_ptr<RoomFleet> made{new RoomFleet{options}};
    KVSHARD_TRY(made->make());
    return made;
  }

  [[nodiscard]] std::uint32_t rooms() const { return options_.rooms; }
  /// KV bytes of one request.
  [[nodiscard]] std::uint64_t request_bytes() const {
    return std::uint64_t{options_.shard_size} * options_.page_bytes;
  }

  /// Opens the place's next room and pulls it.
  Status start(std::uint32_t place) {
    Place& at = places_[place];
    at.room = RoomId{next_room_++ * options_.rooms + place};
    for (Prefill& prefill : group_of(place)) KVSHARD_TRY(prefill.rank->open(at.room));
    Decode& decode = decode_of(place);
    KVSHARD_TRY(decode.rank->pull({.group = decode.groups[place % options_.groups],
                                   .room = at.room,
                                   .pages = at.to,
                                   .deadline = kLimit}));
    return {};
  }
  Status publish(std::uint32_t place) {
    const Place& at = places_[place];
    for (Prefill& prefill : group_of(place))
      KVSHARD_TRY(prefill.rank->publish(at.room, {.pages = at.from, .last = true}));
    return {};
  }
  /// Waits until every pull that was started has reached all its prefill ranks.
  Status await_pulls() {
    const std::uint64_t started = next_room_ * options_.shard_size;
    return await([&] {
      std::uint64_t reached = 0;
      for (const Prefill& prefill : prefills_) reached += prefill.rank->stats().pulls_started;
      return reached == started;
    });
  }
  /// Waits for pulls to end, verifies them, and says which places they held: valid until the next call.
  Result<std::span<const std::uint32_t>> collect() {
    done_.clear();
    while (done_.empty()) {
      for (Decode& decode : decodes_) {
        const std::size_t count = decode.rank->poll(pull_events_);
        for (const PullEvent& event : std::span{pull_events_}.first(count)) {
          KVSHARD_TRY(event.status);
          done_.push_back(static_cast<std::uint32_t>(index(event.room) % options_.rooms));
          KVSHARD_TRY(verify(done_.back()));
        }
      }
      if (!done_.empty()) break;
      if (options_.turn) {
        options_.turn();
        continue;
      }
      std::vector<pollfd> fds;
      for (const Decode& decode : decodes_)
        fds.push_back({.fd = decode.rank->event_fd(), .events = POLLIN, .revents = 0});
      if (::poll(fds.data(), fds.size(), static_cast<int>(kLimit.count())) <= 0)
        return Error{ErrorCode::deadline_exceeded, "no pull ended"};
    }
    // Each request ends on every rank of its group; there is no need to ask them all each time.
    if ((since_drained_ += done_.size()) >= 64) KVSHARD_TRY(drain_rooms());
    return std::span<const std::uint32_t>{done_};
  }
  /// After the last collect(): every room has ended well, nothing is held, and no byte was written that
  /// should not have been.
  Status check_idle() {
    Status failed;
    KVSHARD_TRY(await([&] {
      failed = drain_rooms();
      return !failed || rooms_ended_ == next_room_ * options_.shard_size;
    }));
    KVSHARD_TRY(failed);
    for (const Prefill& prefill : prefills_) {
      const PrefillStats stats = prefill.rank->stats();
      if (stats.rooms + stats.leases + stats.slots_in_use + stats.pulls_waiting +
              stats.pulls_failed + stats.stale_commits !=
          0) {
        return Error{ErrorCode::internal,
                     fmt::format("prefill holds {} rooms, {} leases, {} slots, {} waiting pulls; "
                                 "{} failed, {} stale",
                                 stats.rooms, stats.leases, stats.slots_in_use, stats.pulls_waiting,
                                 stats.pulls_failed, stats.stale_commits)};
      }
    }
    for (const Decode& decode : decodes_) {
      const DecodeStats stats = decode.rank->stats();
      if (stats.pulls + stats.landing_in_use + stats.quarantined + stats.stale != 0 ||
          stats.pulls_started != stats.pulls_done) {
        return Error{ErrorCode::internal,
                     fmt::format("decode holds {} pulls, {} landing slots, {} quarantined; {} of "
                                 "{} done, {} stale",
                                 stats.pulls, stats.landing_in_use, stats.quarantined,
                                 stats.pulls_done, stats.pulls_started, stats.stale)};
      }
      if (!std::ranges::all_of(decode.memory, [](std::byte byte) { return byte == kCanary; }))
        return Error{ErrorCode::data_loss, "a page was written that nobody asked for"};
    }
    return {};
  }

 private:
  static constexpr std::byte kCanary{0xc5};
  // 10,000 rooms take minutes to drain on two busy cores.
  static constexpr std::chrono::milliseconds kLimit{3'600'000};

  struct Prefill {
    std::vector<std::byte> memory;
    std::unique_ptr<PrefillRank> rank;
  };
  struct Decode {
    std::vector<std::byte> memory;
    std::unique_ptr<DecodeRank> rank;
    std::vector<GroupId> groups;
  };
  struct Place {
    RoomId room{};
    std::vector<LogicalPage> from;
    std::vector<LocalPage> to;
  };

  explicit RoomFleet(const FleetOptions& options) : options_{options} {}

  [[nodiscard]] std::span<Prefill> group_of(std::uint32_t place) {
    return std::span{prefills_}.subspan(place % options_.groups * options_.shard_size,
                                        options_.shard_size);
  }
  [[nodiscard]] Decode& decode_of(std::uint32_t place) {
    return decodes_[place / options_.groups % options_.decode_ranks];
  }

  Pool pool(std::vector<std::byte>& memory, std::uint32_t page_count, std::uint32_t parts,
            std::uint32_t part) const {
    memory.assign(std::size_t{page_count} * options_.page_bytes, kCanary);
    return {.geometry = {.model_id = "rooms",
                         .groups = {{.layers = 1,
                                     .buffers_per_layer = 1,
                                     .heads = 1,
                                     .head_bytes = options_.page_bytes / 4,
                                     .page_size = 4,
                                     .page_count = page_count,
                                     .parts = parts,
                                     .part = part}}},
            .buffers = {{memory.data()}}};
  }

  Status make() {
    const std::uint32_t shards = options_.shard_size;
    const std::uint32_t rows = (options_.rooms + options_.groups - 1) / options_.groups;
    prefills_.resize(std::size_t{options_.groups} * shards);
    std::vector<GroupSpec> specs(options_.groups);
    for (std::uint32_t i = 0; i < prefills_.size(); ++i) {
      Prefill& prefill = prefills_[i];
      PrefillOptions ours;
      ours.group = fmt::format("group-{}", i / shards);
      ours.shard_rank = i % shards;
      ours.shard_size = shards;
      ours.pool = pool(prefill.memory, rows + 1, shards, i % shards);
      ours.slot_payload_bytes = options_.page_bytes;
      ours.exported = false;
      ours.lease = ours.slot_timeout = ours.pull_timeout = kLimit;
      ours.peer_timeout = kLimit;  // so many ranks share few cores
      ours.metrics = options_.metrics;
      ours.tracer = options_.tracer;
      fill(prefill.memory, i);
      KVSHARD_TRY(auto transport, make_transport(options_.transport));
      KVSHARD_TRY(auto engine, make_copy_engine({}));
      KVSHARD_TRY(prefill.rank,
                  PrefillRank::create(std::move(ours), std::move(transport), std::move(engine)));
      GroupSpec& spec = specs[i / shards];
      spec.name = fmt::format("group-{}", i / shards);
      spec.epoch = 1;
      spec.members.push_back(prefill.rank->member());
    }
    const std::uint32_t each = (options_.rooms + options_.decode_ranks - 1) / options_.decode_ranks;
    decodes_.resize(options_.decode_ranks);
    for (Decode& decode : decodes_) {
      DecodeOptions ours;
      ours.pool = pool(decode.memory, (each + options_.groups) * shards + 1, 1, 0);
      ours.landing_payload_bytes = options_.page_bytes;
      ours.landing_slots = 64;
      ours.peer_timeout = ours.fetch_timeout = kLimit;
      ours.metrics = options_.metrics;
      ours.tracer = options_.tracer;
      KVSHARD_TRY(auto transport, make_transport(options_.transport));
      KVSHARD_TRY(auto engine, make_copy_engine({}));
      KVSHARD_TRY(decode.rank,
                  DecodeRank::create(std::move(ours), std::move(transport), std::move(engine)));
      for (const GroupSpec& spec : specs) {
        KVSHARD_TRY(decode.groups.emplace_back(), decode.rank->connect(spec, kLimit));
      }
    }
    std::vector<std::uint32_t> taken(options_.decode_ranks);  // pages of each decode rank
    places_.resize(options_.rooms);
    for (std::uint32_t place = 0; place < options_.rooms; ++place) {
      const std::uint32_t row = 1 + place / options_.groups;  // its local page on each rank
      std::uint32_t& next = taken[place / options_.groups % options_.decode_ranks];
      for (std::uint32_t i = 0; i < shards; ++i) {
        places_[place].from.push_back(LogicalPage{row * shards + (row + i) % shards});
        places_[place].to.push_back(LocalPage{++next});
      }
      std::ranges::reverse(places_[place].to);
    }
    return {};
  }

  // Each word is a function of the rank and of its place there.
  static void fill(std::span<std::byte> memory, std::uint64_t rank) {
    for (std::size_t at = 0; at < memory.size(); at += 8) {
      std::uint64_t word = (rank << 40 | at) * 0x9e3779b97f4a7c15U;
      word ^= word >> 29;
      std::memcpy(&memory[at], &word, 8);
    }
  }

  Status verify(std::uint32_t place) {
    const Place& at = places_[place];
    const std::uint32_t shards = options_.shard_size;
    for (std::size_t i = 0; i < at.to.size(); ++i) {
      const std::uint32_t source = index(at.from[i]);
      const std::byte* const sent =
          &group_of(place)[source % shards]
               .memory[std::size_t{source / shards} * options_.page_bytes];
      std::byte* const got =
          &decode_of(place).memory[std::size_t{index(at.to[i])} * options_.page_bytes];
      if (std::memcmp(got, sent, options_.page_bytes) != 0) {
        return Error{ErrorCode::data_loss,
                     fmt::format("room {}: position {} is wrong", index(at.room), i)};
      }
      std::memset(got, static_cast<int>(kCanary), options_.page_bytes);
    }
    return {};
  }

  Status drain_rooms() {
    since_drained_ = 0;
    for (const Prefill& prefill : prefills_) {
      while (const std::size_t count = prefill.rank->poll(room_events_)) {
        for (const RoomEvent& event : std::span{room_events_}.first(count))
          KVSHARD_TRY(event.status);
        rooms_ended_ += count;
      }
    }
    return {};
  }

  template <typename Done>
  Status await(const Done& done) const {
    const auto until = std::chrono::steady_clock::now() + kLimit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > until)
        return Error{ErrorCode::deadline_exceeded, "the ranks did not get there"};
      if (options_.turn)
        options_.turn();
      else
        std::this_thread::yield();
    }
    return {};
  }

  FleetOptions options_;
  std::vector<Prefill> prefills_;  // group by group
  std::vector<Decode> decodes_;    // closed before the prefill ranks are
  std::vector<Place> places_;
  std::uint64_t next_room_{0};
  std::uint64_t rooms_ended_{0};  // on each rank of their groups
  std::size_t since_drained_{0};
  std::vector<std::uint32_t> done_;
  std::vector<PullEvent> pull_events_ = std::vector<PullEvent>(64);
  std::vector<RoomEvent> room_events_ = std::vector<RoomEvent>(256);
};

/// What one request cost.
struct RequestCost {
  double cpu_ns{0};  ///< of the whole process, all threads
  double wall_ns{0};
};

/// Time that passed and that this process used.
class CostClock {
 public:
  [[nodiscard]] RequestCost per(std::uint64_t requests) const {
    const auto each = [&](clockid_t id, std::int64_t start) {
      return static_cast<double>(read(id) - start) / static_cast<double>(requests);
    };
    return {.cpu_ns = each(CLOCK_PROCESS_CPUTIME_ID, cpu_),
            .wall_ns = each(CLOCK_MONOTONIC, wall_)};
  }

 private:
  static std::int64_t read(clockid_t id) {
    timespec time{};
    (void)::clock_gettime(id, &time);
    return time.tv_sec * std::int64_t{1'000'000'000} + time.tv_nsec;
  }
  std::int64_t cpu_{read(CLOCK_PROCESS_CPUTIME_ID)};
  std::int64_t wall_{read(CLOCK_MONOTONIC)};
};

/// Keeps all rooms pulled and waiting but for `active`, whose chunks are there; for each that ends another
/// is opened and pulled. So the work at hand is the same however many wait. Measures `requests` after
/// `warm` others, and ends with nothing in flight.
inline Result<RequestCost> run_waiting(RoomFleet& fleet, std::uint32_t active, std::uint64_t warm,
                                       std::uint64_t requests) {
  std::deque<std::uint32_t> waiting;
  for (std::uint32_t place = 0; place < fleet.rooms(); ++place) {
    KVSHARD_TRY(fleet.start(place));
    waiting.push_back(place);
  }
  KVSHARD_TRY(fleet.await_pulls());
  const auto publish_next = [&]() -> Status {
    const std::uint32_t place = waiting.front();
    waiting.pop_front();
    return fleet.publish(place);
  };
  const auto run = [&](std::uint64_t count) -> Status {
    for (std::uint64_t done = 0; done < count;) {
      KVSHARD_TRY(const auto ended, fleet.collect());
      for (const std::uint32_t place : ended) {
        KVSHARD_TRY(fleet.start(place));
        waiting.push_back(place);
        KVSHARD_TRY(publish_next());
      }
      done += ended.size();
    }
    return {};
  };
  for (std::uint32_t i = 0; i < active; ++i) KVSHARD_TRY(publish_next());
  KVSHARD_TRY(run(warm));
  const CostClock clock;
  KVSHARD_TRY(run(requests));
  const RequestCost cost = clock.per(requests);
  while (!waiting.empty()) KVSHARD_TRY(publish_next());
  for (std::size_t left = fleet.rooms(); left > 0;) {
    KVSHARD_TRY(const auto ended, fleet.collect());
    left -= ended.size();
  }
  KVSHARD_TRY(fleet.check_idle());
  return cost;
}

/// All rooms are pulled, then published at once, then awaited: one round. Measures as many rounds as
/// make `requests`, at least one, after a first one.
inline Result<RequestCost> run_at_once(RoomFleet& fleet, std::uint64_t requests) {
  const auto round = [&]() -> Status {
    for (std::uint32_t place = 0; place < fleet.rooms(); ++place) KVSHARD_TRY(fleet.start(place));
    for (std::uint32_t place = 0; place < fleet.rooms(); ++place) KVSHARD_TRY(fleet.publish(place));
    for (std::size_t left = fleet.rooms(); left > 0;) {
      KVSHARD_TRY(const auto ended, fleet.collect());
      left -= ended.size();
    }
    return {};
  };
  KVSHARD_TRY(round());
  const std::uint64_t rounds = std::max<std::uint64_t>(1, requests / fleet.rooms());
  const CostClock clock;
  for (std::uint64_t i = 0; i < rounds; ++i) KVSHARD_TRY(round());
  const RequestCost cost = clock.per(rounds * fleet.rooms());
  KVSHARD_TRY(fleet.check_idle());
  return cost;
}

}  // namespace kvshard::bench
