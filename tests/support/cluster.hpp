#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvshard/decode_rank.hpp"
#include "kvshard/page_allocator.hpp"
#include "support/prefill_driver.hpp"

namespace kvshard::test {

enum class Where { loopback, ucx_threads, ucx_processes };

inline std::string to_string(Where where) {
  return where == Where::loopback      ? "Loopback"
         : where == Where::ucx_threads ? "UcxThreads"
                                       : "UcxProcesses";
}

inline void PrintTo(Where where, std::ostream* out) {
  *out << to_string(where);
}

struct ClusterOptions {
  Where where{Where::loopback};
  std::uint32_t shard_size{2};
  std::uint32_t pages_per_rank{64};  // usable ones
  std::uint32_t decode_pages{256};
  Geometry geometry{small_geometry(0)};  // page counts are filled in
  PrefillOptions prefill{};
  DecodeOptions decode{};
  TransferPath path{TransferPath::automatic};
  const Clock* clock{nullptr};            // of the decode rank and of prefill ranks in this process
  std::function<void()> before_decode{};  // called when the prefill ranks are there
};

/// N prefill ranks and a decode rank, with the allocators that their engines would have.
class Cluster {
 public:
  explicit Cluster(ClusterOptions options) : options_{std::move(options)} {
    const TransportOptions transport{.kind = options_.where == Where::loopback
                                                 ? TransportOptions::Kind::loopback
                                                 : TransportOptions::Kind::ucx,
                                     .path = options_.path};
    const std::uint32_t page_size = options_.geometry.groups[0].page_size;
    layout.emplace(PageLayout::create(options_.shard_size, page_size).value());
    allocator.emplace(PageAllocator::create(*layout, options_.pages_per_rank).value());
    for (std::uint32_t rank = 0; rank < options_.shard_size; ++rank)
      prefills.push_back(make_prefill(rank));
    Geometry geometry = options_.geometry;
    for (BufferGroup& group : geometry.groups) group.page_count = options_.decode_pages;
    pool.emplace(geometry);
    DecodeOptions decode_options = options_.decode;
    decode_options.pool = pool->pool();
    if (options_.before_decode) options_.before_decode();
    auto made = DecodeRank::create(decode_options, make_transport(transport).value(),
                                   make_copy_engine({}).value(), options_.clock);
    EXPECT_TRUE(made.ok()) << (made ? "" : made.error().message);
    decode = std::move(made).value();
    for (std::uint32_t page = 1; page < options_.decode_pages; ++page)
      free_pages_.push_back(LocalPage{page});
  }

  std::unique_ptr<PrefillDriver> make_prefill(std::uint32_t rank) {
    PrefillSetup setup{.options = options_.prefill, .geometry = options_.geometry, .transport = {}};
    setup.options.shard_rank = rank;
    setup.options.shard_size = options_.shard_size;
    for (BufferGroup& group : setup.geometry.groups) group.page_count = options_.pages_per_rank + 1;
    setup.geometry = by_page(setup.geometry, rank, options_.shard_size);
    setup.transport.kind = options_.where == Where::loopback ? TransportOptions::Kind::loopback
                                                             : TransportOptions::Kind::ucx;
    setup.transport.path = options_.path;
    if (options_.where == Where::ucx_processes) return std::make_unique<ChildPrefill>(setup);
    return std::make_unique<LocalPrefill>(setup, options_.clock);
  }

  GroupSpec spec() {
    GroupSpec group{.name = options_.prefill.group, .epoch = options_.prefill.epoch, .members = {}};
    for (auto& prefill : prefills) group.members.push_back(prefill->member());
    return group;
  }
  GroupId connect() {
    auto group = decode->connect(spec(), std::chrono::seconds{20});
    EXPECT_TRUE(group.ok()) << (group ? "" : group.error().message);
    return group ? *group : GroupId{};
  }

  std::vector<LogicalPage> chain(std::uint32_t pages) {
    std::vector<LogicalPage> chain(pages);
    const auto drawn = allocator->draw_chain(chain);
    EXPECT_TRUE(drawn.ok()) << (drawn ? "" : drawn.error().message);
    return chain;
  }
  /// Decode pages from scattered places.
  std::vector<LocalPage> destinations(std::uint32_t pages) {
    std::vector<LocalPage> taken;
    for (std::uint32_t i = 0; i < pages && !free_pages_.empty(); ++i) {
      const std::size_t at = (i * 7919U) % free_pages_.size();
      taken.push_back(free_pages_[at]);
      free_pages_.erase(free_pages_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    EXPECT_EQ(taken.size(), pages);
    return taken;
  }

  void fill(const std::vector<LogicalPage>& pages, const Content& content,
            std::uint32_t first_position = 0) {
    for (auto& prefill : prefills) prefill->fill(pages, first_position, content);
  }
  void open(RoomId room, std::uint32_t pullers = 1) {
    for (auto& prefill : prefills) {
      const Status status = prefill->open(room, pullers);
      EXPECT_TRUE(status.ok()) << (status ? "" : status.error().message);
    }
  }
  void publish(const PublishCall& call) {
    for (auto& prefill : prefills) {
      const Status status = prefill->publish(call);
      EXPECT_TRUE(status.ok()) << (status ? "" : status.error().message);
    }
  }

  Result<PullEvent> next_event(int seconds = 20) { return next_event(*decode, seconds); }
  static Result<PullEvent> next_event(DecodeRank& rank, int seconds = 20) {
    PullEvent event;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{seconds};
    for (;;) {
      if (rank.poll({&event, 1}) == 1) return event;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          until - std::chrono::steady_clock::now());
      if (left.count() <= 0) return Error{ErrorCode::deadline_exceeded, "no pull ended"};
      pollfd fd{.fd = rank.event_fd(), .events = POLLIN, .revents = 0};
      (void)::poll(&fd, 1, static_cast<int>(left.count()));
    }
  }

  /// A whole request: fill, open, publish in one chunk, pull from `first`, and compare every byte.
  void run_request(GroupId group, RoomId room, std::uint32_t pages, std::uint32_t first = 0) {
    const std::vector<LogicalPage> source = chain(pages);
    const std::vector<LocalPage> to = destinations(pages);
    const Content content{.request = index(room), .generation = 1};
    fill(source, content);
    open(room);
    publish({.room = room, .pages = source, .last = true, .side_data = "first token 42"});
    const auto pull = decode->pull({.group = group,
                                    .room = room,
                                    .pages = std::span{to}.subspan(first),
                                    .first_position = first});
    ASSERT_TRUE(pull.ok()) << pull.error().message;
    const auto event = next_event();
    ASSERT_TRUE(event.ok()) << event.error().message;
    ASSERT_TRUE(event->status.ok()) << event->status.error().message;
    EXPECT_EQ(event->pull, *pull);
    EXPECT_EQ(event->side_data.size(), prefills.size());
    for (const SideData& side : event->side_data) {
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(side.bytes.data()), side.bytes.size()),
                "first token 42");
    }
    for (std::uint32_t i = 0; i < pages; ++i) {
      if (i < first) {
        EXPECT_TRUE(pool->untouched(to[i]));
      } else {
        EXPECT_TRUE(pool->holds(to[i], i, content));
      }
    }
    for (const LocalPage page : free_pages_) ASSERT_TRUE(pool->untouched(page));
    ASSERT_TRUE(pool->untouched(LocalPage{0}));
    for (auto& prefill : prefills) {
      const auto ended = prefill->next_event();
      ASSERT_TRUE(ended.ok()) << ended.error().message;
      EXPECT_EQ(ended->room, room);
      EXPECT_TRUE(ended->status.ok()) << (ended->status ? "" : ended->status.error().message);
    }
    EXPECT_TRUE(allocator->free_chain(source).ok());
    for (const LocalPage page : to) {
      pool->wipe(page);
      free_pages_.push_back(page);
    }
  }

  /// Pins, leases, slots and operations in flight are back to zero.
  void expect_idle() {
    for (auto& prefill : prefills) {
      const PrefillStats stats = prefill->stats();
      EXPECT_EQ(stats.rooms, 0U);
      EXPECT_EQ(stats.leases, 0U);
      EXPECT_EQ(stats.slots_in_use, 0U);
      EXPECT_EQ(stats.pulls_waiting, 0U);
      EXPECT_EQ(stats.pulls_started, stats.pulls_committed + stats.pulls_failed);
    }
    const DecodeStats stats = decode->stats();
    EXPECT_EQ(stats.pulls, 0U);
    EXPECT_EQ(stats.landing_in_use, 0U);
    EXPECT_EQ(stats.quarantined, 0U);
    EXPECT_EQ(stats.pulls_started, stats.pulls_done + stats.pulls_failed + stats.pulls_cancelled);
  }

  std::optional<PageLayout> layout;
  std::optional<PageAllocator> allocator;
  std::vector<std::unique_ptr<PrefillDriver>> prefills;
  std::optional<PatternedPool> pool;
  std::unique_ptr<DecodeRank> decode;

 private:
  ClusterOptions options_;
  std::vector<LocalPage> free_pages_;
};

}  // namespace kvshard::test
