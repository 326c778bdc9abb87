#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvshard/clock.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/fault_injection.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/prefill_rank.hpp"
#include "support/patterned_pool.hpp"

namespace kvshard::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Looks until `done()`, at most `limit`; the deadline of every wait in these tests.
template <typename Done>
bool eventually(Done done, std::chrono::milliseconds limit = std::chrono::seconds{20}) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

/// What a leak would raise.
struct ProcessUse {
  std::size_t fds{0}, threads{0}, resident_kib{0};

  static ProcessUse now() {
    ProcessUse use;
    DIR* const directory = ::opendir("/proc/self/fd");
    while (::readdir(directory) != nullptr) ++use.fds;
    ::closedir(directory);
    std::ifstream status{"/proc/self/status"};
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("Threads:", 0) == 0) use.threads = std::stoul(line.substr(8));
      if (line.rfind("VmRSS:", 0) == 0) use.resident_kib = std::stoul(line.substr(6));
    }
    return use;
  }
};

struct FaultSetup {
  std::uint32_t shard_size{2};
  std::uint32_t pages_per_rank{64};
  std::uint32_t decode_pages{256};
  PrefillOptions prefill{};
  DecodeOptions decode{};
  std::shared_ptr<FaultPlan> prefill_faults{}, decode_faults{};
  const Clock* clock{nullptr};
  TransportOptions transport{.kind = TransportOptions::Kind::loopback};

  /// Only `manual` moves time, and the ranks soon see it move.
  FaultSetup& on(const ManualClock& manual) {
    clock = &manual;
    prefill.heartbeat = decode.heartbeat = std::chrono::milliseconds{20};
    return *this;
  }
  /// One page of one rank in each piece.
  FaultSetup& one_page_pieces() {
    prefill.slot_payload_bytes = decode.landing_payload_bytes = kPageBytes;
    return *this;
  }
  static constexpr std::uint64_t kPageBytes = 3ULL * 2 * 4 * 2 * 16;  // small_geometry()
};

/// A request with its pages on both sides.
struct FaultRequest {
  RoomId room{};
  std::vector<LogicalPage> source;
  std::vector<LocalPage> to;
  Content content;
};

/// Prefill ranks and decode ranks of one process, with faults, and the allocators of their engines.
class FaultCluster {
 public:
  explicit FaultCluster(FaultSetup setup) : setup_{std::move(setup)} {
    layout = PageLayout::create(setup_.shard_size, 4).value();
    allocator.emplace(PageAllocator::create(*layout, setup_.pages_per_rank).value());
    for (std::uint32_t rank = 0; rank < setup_.shard_size; ++rank)
      pools.push_back(std::make_unique<PatternedPool>(
          by_page(small_geometry(setup_.pages_per_rank + 1), rank, setup_.shard_size)));
    pool.emplace(small_geometry(setup_.decode_pages));
    for (std::uint32_t page = 1; page < setup_.decode_pages; ++page)
      free_.push_back(LocalPage{page});
  }

  Status start() {
    for (std::uint32_t rank = 0; rank < setup_.shard_size; ++rank) {
      auto made = make_prefill(rank);
      if (!made) return made.error();
      prefills.push_back(std::move(made).value());
    }
    auto made = make_decode(setup_.decode_faults);
    if (!made) return made.error();
    decode = std::move(made).value();
    return {};
  }

  Result<std::unique_ptr<PrefillRank>> make_prefill(std::uint32_t rank) {
    PrefillOptions options = setup_.prefill;
    options.shard_rank = rank;
    options.shard_size = setup_.shard_size;
    options.pool = pools[rank]->pool();
    return PrefillRank::create(std::move(options), transport(setup_.prefill_faults),
                               engine(setup_.prefill_faults), setup_.clock);
  }
  Result<std::unique_ptr<DecodeRank>> make_decode(const std::shared_ptr<FaultPlan>& faults) {
    DecodeOptions options = setup_.decode;
    options.pool = pool->pool();
    return DecodeRank::create(std::move(options), transport(faults), engine(faults), setup_.clock);
  }

  GroupSpec spec() {
    GroupSpec group{.name = setup_.prefill.group, .epoch = setup_.prefill.epoch, .members = {}};
    for (auto& prefill : prefills) group.members.push_back(prefill->member());
    return group;
  }
  GroupId connect() {
    const auto group = decode->connect(spec(), std::chrono::seconds{20});
    EXPECT_TRUE(group.ok()) << (group ? "" : group.error().message);
    return group.value_or(GroupId{});
  }

  /// Pages on both sides, the source ones filled; not opened yet.
  FaultRequest request(std::uint64_t room, std::uint32_t pages) {
    FaultRequest made{
        .room = RoomId{room}, .source{}, .to{}, .content = {.request = room, .generation = 1}};
    made.source.resize(pages);
    EXPECT_TRUE(allocator->draw_chain(made.source).ok());
    EXPECT_GE(free_.size(), pages);
    made.to.assign(free_.end() - pages, free_.end());
    free_.resize(free_.size() - pages);
    for (std::uint32_t i = 0; i < pages; ++i) {
      const Placement place = layout->place(made.source[i]);
      pools[place.rank]->fill(place.page, i, made.content);
    }
    return made;
  }
  void publish(const FaultRequest& request, std::uint32_t pullers = 1) {
    for (auto& prefill : prefills) {
      EXPECT_TRUE(prefill->open(request.room, pullers).ok());
      EXPECT_TRUE(prefill->publish(request.room, {.pages = request.source, .last = true}).ok());
    }
  }
  Result<PullId> pull(GroupId group, const FaultRequest& request,
                      std::chrono::milliseconds deadline = std::chrono::seconds{20}) {
    return decode->pull(
        {.group = group, .room = request.room, .pages = request.to, .deadline = deadline});
  }
  /// To be called once both sides have ended.
  void free(const FaultRequest& request) {
    EXPECT_TRUE(allocator->free_chain(request.source).ok());
    for (const LocalPage page : request.to) pool->wipe(page);
    free_.insert(free_.end(), request.to.begin(), request.to.end());
  }
  [[nodiscard]] ::testing::AssertionResult exact(const FaultRequest& request) const {
    for (std::uint32_t i = 0; i < request.to.size(); ++i) {
      if (auto held = pool->holds(request.to[i], i, request.content); !held) return held;
    }
    return ::testing::AssertionSuccess();
  }
  /// The pages that no request has.
  [[nodiscard]] ::testing::AssertionResult canaries() const {
    for (const LocalPage page : free_) {
      if (auto held = pool->untouched(page); !held) return held;
    }
    return pool->untouched(LocalPage{0});
  }

  template <typename Event, typename Rank>
  static std::optional<Event> next(Rank& rank,
                                   std::chrono::milliseconds limit = std::chrono::seconds{20}) {
    Event event;
    const auto until = std::chrono::steady_clock::now() + limit;
    while (rank.poll({&event, 1}) == 0) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      if (left.count() <= 0) return std::nullopt;
      pollfd fd{.fd = rank.event_fd(), .events = POLLIN, .revents = 0};
      (void)::poll(&fd, 1, static_cast<int>(left.count()));
    }
    return event;
  }
  /// The next pull's status; deadline_exceeded with "no event" when none comes.
  Status pull_status(std::chrono::milliseconds limit = std::chrono::seconds{20}) {
    auto event = next<PullEvent>(*decode, limit);
    return event ? std::move(event->status)
                 : Status{Error{ErrorCode::deadline_exceeded, "no event"}};
  }
  /// Every prefill rank's next room ends with `ok`.
  void expect_room_ends(RoomId room, bool ok) {
    for (auto& prefill : prefills) {
      const auto event = next<RoomEvent>(*prefill);
      ASSERT_TRUE(event);
      EXPECT_EQ(event->room, room);
      EXPECT_EQ(event->status.ok(), ok) << (event->status ? "" : event->status.error().message);
    }
  }
  /// A whole request that must succeed.
  void expect_works(GroupId group, std::uint64_t room, std::uint32_t pages = 5) {
    const FaultRequest made = request(room, pages);
    publish(made);
    ASSERT_TRUE(pull(group, made).ok());
    const Status status = pull_status();
    ASSERT_TRUE(status.ok()) << status.error().message;
    EXPECT_TRUE(exact(made));
    expect_room_ends(made.room, true);
    free(made);
  }

  [[nodiscard]] bool idle() const {
    for (const auto& prefill : prefills) {
      const PrefillStats s = prefill->stats();
      if (s.rooms + s.leases + s.slots_in_use + s.pulls_waiting != 0) return false;
      if (s.pulls_started != s.pulls_committed + s.pulls_failed) return false;
      if (s.rooms_opened != s.rooms_done + s.rooms_failed) return false;
    }
    const DecodeStats s = decode->stats();
    return s.pulls + s.landing_in_use + s.quarantined == 0 &&
           s.pulls_started == s.pulls_done + s.pulls_failed + s.pulls_cancelled;
  }

  /// Why it is not idle.
  [[nodiscard]] std::string describe() const {
    std::string text;
    const auto add = [&](const char* name, std::uint64_t value) {
      text += std::string{" "} + name + "=" + std::to_string(value);
    };
    for (const auto& prefill : prefills) {
      const PrefillStats s = prefill->stats();
      add("rooms", s.rooms);
      add("leases", s.leases);
      add("slots", s.slots_in_use);
      add("waiting", s.pulls_waiting);
      add("started", s.pulls_started);
      add("committed", s.pulls_committed);
      add("failed", s.pulls_failed);
    }
    const DecodeStats s = decode->stats();
    add("pulls", s.pulls);
    add("landing", s.landing_in_use);
    add("quarantined", s.quarantined);
    add("started", s.pulls_started);
    add("done", s.pulls_done);
    add("failed", s.pulls_failed);
    add("cancelled", s.pulls_cancelled);
    return text;
  }

  std::optional<PageLayout> layout;
  std::optional<PageAllocator> allocator;
  std::vector<std::unique_ptr<PatternedPool>> pools;
  std::optional<PatternedPool> pool;
  std::vector<std::unique_ptr<PrefillRank>> prefills;
  std::unique_ptr<DecodeRank> decode;

 private:
  std::unique_ptr<Transport> transport(const std::shared_ptr<FaultPlan>& faults) const {
    auto made = make_transport(setup_.transport).value();
    return faults ? make_fault_transport(std::move(made), faults).value() : std::move(made);
  }
  static std::unique_ptr<CopyEngine> engine(const std::shared_ptr<FaultPlan>& faults) {
    auto made = make_copy_engine({}).value();
    return faults ? make_fault_copy_engine(std::move(made), faults) : std::move(made);
  }

  FaultSetup setup_;
  std::vector<LocalPage> free_;
};

}  // namespace kvshard::test
