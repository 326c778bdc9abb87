#include "bench/replay.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/try.hpp"
#include "bench/pool.hpp"
#include "bench/prefix_cache.hpp"
#include "bench/svg.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/prefill_rank.hpp"

namespace kvshard::bench {
namespace {

constexpr std::size_t kCurvePoints = 200;

// What a page holds follows from its block, whichever request it came with, and from its position.
PageContent content_at(const TraceRequest& request, std::uint32_t block_pages,
                       std::uint32_t position, LocalPage page) {
  return {page, (std::uint64_t{request.blocks[position / block_pages]} << 32) | position};
}

/// One run over a group of some size: the engine's part of both sides, played by one thread.
class Replay {
 public:
  Replay(const ReplayConfig& config, std::span<const TraceRequest> requests, std::uint32_t shards)
      : config_{config}, requests_{requests}, shards_{shards} {}

  /// The cache alone when `transfers` is off.
  Result<Json> run(std::uint64_t pool_tokens, bool transfers) {
    KVSHARD_TRY(const auto layout, PageLayout::create(shards_, config_.page_size));
    const auto pages_per_rank =
        static_cast<std::uint32_t>(pool_tokens / (std::uint64_t{shards_} * config_.page_size));
    KVSHARD_TRY(auto allocator, PageAllocator::create(layout, pages_per_rank));
    cache_ = std::make_unique<PrefixCache>(layout, std::move(allocator));
    peak_pages_.resize(shards_);
    if (transfers) KVSHARD_TRY(start_ranks(pages_per_rank));
    const auto begin = std::chrono::steady_clock::now();
    while (ended_ < requests_.size()) {
      KVSHARD_TRY(admit(transfers));
      if (transfers) {
        KVSHARD_TRY(take_events());
      } else {
        KVSHARD_TRY(finish(running_.begin()));
      }
    }
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    KVSHARD_TRY(check_nothing_left(transfers));
    return report(pages_per_rank, took);
  }

 private:
  struct Running {
    std::size_t number{0};
    PrefixCache::Request held;
    std::vector<LocalPage> destination;
    std::uint32_t open_ends{0};  // ranks that have not let go of it
  };
  using RunningMap = std::unordered_map<std::uint64_t, Running>;  // by room

  [[nodiscard]] Geometry geometry(std::uint32_t rank, std::uint32_t page_count) const {
    BufferGroup group{.layers = config_.layers,
                      .buffers_per_layer = 2,
                      .element_type = ElementType::u8,
                      .heads = 1,
                      .head_bytes = config_.head_bytes,
                      .page_size = config_.page_size,
                      .page_count = page_count};
    return {.model_id = "replay", .groups = {std::move(group)}, .rank = rank, .ranks = 1};
  }

  Status start_ranks(std::uint32_t pages_per_rank) {
    const TransportOptions transport{.kind = config_.transport};
    GroupSpec group{.name = "kvshard", .epoch = 1, .members = {}};
    for (std::uint32_t rank = 0; rank < shards_; ++rank) {
      Geometry shape = geometry(rank, pages_per_rank + 1);
      shape.ranks = shards_;
      shape.groups[0].parts = shards_;
      shape.groups[0].part = rank;
      KVSHARD_TRY(auto pool, PatternPool::create(std::move(shape), MemoryKind::host, -1));
      pools_.push_back(std::move(pool));
      PrefillOptions options;
      options.shard_rank = rank;
      options.shard_size = shards_;
      options.pool = pools_.back().describe();
      options.slot_payload_bytes = config_.slot_bytes;
      options.slots = config_.slots;
      KVSHARD_TRY(auto moves, make_transport(transport));
      KVSHARD_TRY(auto copies, make_copy_engine({}));
      KVSHARD_TRY(auto made,
                  PrefillRank::create(std::move(options), std::move(moves), std::move(copies)));
      prefill_.push_back(std::move(made));
      group.members.push_back(prefill_.back()->member());
    }
    // Room for every request that runs; a request that is alone may be as long as the longest.
    std::uint64_t longest = 0, all = 0;
    for (const TraceRequest& request : requests_) {
      const std::uint64_t pages = cache_->allocator().layout().pages_for(request.input_tokens);
      longest = std::max(longest, pages);
      all += pages;
    }
    const std::uint64_t usual = all / requests_.size() + 1;
    const auto decode_pages = static_cast<std::uint32_t>(longest + 2 * usual * config_.in_flight);
    KVSHARD_TRY(auto pool,
                PatternPool::create(geometry(0, decode_pages + 1), MemoryKind::host, -1));
    decode_pool_.emplace(std::move(pool));
    for (std::uint32_t page = decode_pages; page > 0; --page)
      free_pages_.push_back(LocalPage{page});
    DecodeOptions options;
    options.pool = decode_pool_->describe();
    options.landing_payload_bytes = config_.slot_bytes;
    options.landing_slots = config_.slots;
    KVSHARD_TRY(auto moves, make_transport(transport));
    KVSHARD_TRY(auto copies, make_copy_engine({}));
    KVSHARD_TRY(decode_,
                DecodeRank::create(std::move(options), std::move(moves), std::move(copies)));
    KVSHARD_TRY(group_, decode_->connect(group, std::chrono::seconds{30}));
    return {};
  }

  // In the trace's order, as many as may run and fit.
  Status admit(bool transfers) {
    while (next_ < requests_.size() && running_.size() < config_.in_flight) {
      const TraceRequest& request = requests_[next_];
      const std::uint64_t pages = cache_->allocator().layout().pages_for(request.input_tokens);
      if (transfers && pages > free_pages_.size()) break;
      KVSHARD_TRY(auto held, cache_->admit(request));
      if (!held) break;
      hit_blocks_ += held->cached_blocks;
      blocks_ += request.blocks.size();
      tokens_ += request.input_tokens;
      Running& running = running_[next_];
      running.number = next_++;
      running.held = *std::move(held);
      for (std::uint32_t rank = 0; rank < shards_; ++rank)
        peak_pages_[rank] = std::max(peak_pages_[rank], used_pages(rank));
      if (next_ % std::max<std::size_t>(1, requests_.size() / kCurvePoints) == 0)
        curve_.push_back({next_, used_pages(0)});
      if (transfers) KVSHARD_TRY(start(running));
    }
    if (running_.empty() && next_ < requests_.size())
      return Error{ErrorCode::internal, "nothing runs, and the next request does not fit"};
    return {};
  }

  [[nodiscard]] std::uint32_t used_pages(std::uint32_t rank) const {
    return cache_->allocator().pages_per_rank() - cache_->allocator().free_pages(rank);
  }

  // Prefill: the owners write what is new. Then both sides are told.
  Status start(Running& running) {
    const TraceRequest& request = requests_[running.number];
    const PageLayout& layout = cache_->allocator().layout();
    const auto pages = static_cast<std::uint32_t>(running.held.pages.size());
    for (std::uint32_t p = running.held.cached_blocks * cache_->block_pages(); p < pages; ++p) {
      const Placement place = layout.place(running.held.pages[p]);
      pools_[place.rank].fill_page(content_at(request, cache_->block_pages(), p, place.page));
    }
    const RoomId room{running.number};
    for (const auto& rank : prefill_) {
      KVSHARD_TRY(rank->open(room));
      KVSHARD_TRY(rank->publish(room, {.pages = running.held.pages, .last = true}));
    }
    const ClassMajorOrder order{layout, Position{0}, pages};
    running.destination.resize(pages);
    for (std::uint32_t i = 0; i < pages; ++i) {
      running.destination[index(order.position(i))] = free_pages_.back();
      free_pages_.pop_back();
    }
    running.open_ends = shards_ + 1;
    KVSHARD_TRY(decode_->pull({.group = group_, .room = room, .pages = running.destination}));
    return {};
  }

  // Waits for one of the ranks, and takes what all of them have to say.
  Status take_events() {
    std::vector<pollfd> fds{{.fd = decode_->event_fd(), .events = POLLIN, .revents = 0}};
    for (const auto& rank : prefill_)
      fds.push_back({.fd = rank->event_fd(), .events = POLLIN, .revents = 0});
    if (::poll(fds.data(), fds.size(), 60'000) == 0)
      return Error{ErrorCode::deadline_exceeded, "no rank said anything for 60 s"};
    PullEvent pulled;
    while (decode_->poll({&pulled, 1}) == 1) {
      KVSHARD_TRY(pulled.status);
      KVSHARD_TRY(take(pulled));
      KVSHARD_TRY(let_go(pulled.room));
    }
    RoomEvent released;
    for (const auto& rank : prefill_) {
      while (rank->poll({&released, 1}) == 1) {
        KVSHARD_TRY(released.status);
        KVSHARD_TRY(let_go(released.room));
      }
    }
    return {};
  }

  Status take(const PullEvent& event) {
    Running& running = running_.at(index(event.room));
    const TraceRequest& request = requests_[running.number];
    for (std::uint32_t p = 0; p < running.destination.size(); ++p) {
      const Status right = decode_pool_->check_page(
          content_at(request, cache_->block_pages(), p, running.destination[p]));
      if (!right)
        return Error{ErrorCode::data_loss, fmt::format("request {}, position {}: {}",
                                                       running.number, p, right.error().message)};
    }
    free_pages_.insert(free_pages_.end(), running.destination.rbegin(), running.destination.rend());
    verified_bytes_ += event.bytes;
    latency_.add(event.total.count());
    std::chrono::nanoseconds first = event.total, last{0};
    std::uint32_t ranks = 0;
    for (const SourceTiming& source : event.sources) {
      if (source.bytes == 0) continue;
      ++ranks;
      first = std::min(first, source.landed);
      last = std::max(last, source.landed);
    }
    if (ranks > 1) skew_.add((last - first).count());
    return {};
  }

  Status let_go(RoomId room) {
    const auto at = running_.find(index(room));
    return --at->second.open_ends > 0 ? Status{} : finish(at);
  }
  Status finish(RunningMap::iterator at) {
    KVSHARD_TRY(cache_->release(at->second.held));
    running_.erase(at);
    ++ended_;
    return {};
  }

  Status check_nothing_left(bool transfers) {
    cached_blocks_ = cache_->blocks();
    evicted_ = cache_->evicted();
    KVSHARD_TRY(cache_->clear());
    std::uint64_t left = cache_->allocator().used_pages() + cache_->blocks();
    if (transfers) {
      for (const auto& rank : prefill_) {
        const PrefillStats stats = rank->stats();
        left += stats.rooms + stats.leases + stats.slots_in_use;
      }
      const DecodeStats stats = decode_->stats();
      left += stats.pulls + stats.landing_in_use + stats.quarantined;
    }
    if (left == 0) return {};
    return Error{ErrorCode::internal,
                 fmt::format("{} pages, blocks, rooms, leases or slots are left at the end", left)};
  }

  [[nodiscard]] Json report(std::uint32_t pages_per_rank, std::chrono::nanoseconds took) const {
    const std::uint64_t page_bytes =
        std::uint64_t{config_.layers} * 2 * config_.head_bytes * config_.page_size;
    const std::uint32_t peak = *std::ranges::max_element(peak_pages_);
    Json run{{"shards", shards_},
             {"requests", ended_},
             {"tokens", tokens_},
             {"pages_per_rank", pages_per_rank},
             {"peak_pages_by_rank", peak_pages_},
             {"peak_pool_bytes", peak * page_bytes},
             {"page_bytes", page_bytes},
             {"blocks", blocks_},
             {"hit_blocks", hit_blocks_},
             {"hit_rate", static_cast<double>(hit_blocks_) / static_cast<double>(blocks_)},
             {"cached_blocks_at_end", cached_blocks_},
             {"evicted_blocks", evicted_},
             {"seconds", static_cast<double>(took.count()) / 1e9}};
    Json& curve = run["curve"] = Json::array();
    for (const auto& [requests, pages] : curve_) curve.push_back({requests, pages});
    if (latency_.size() > 0) {
      run["bytes"] = verified_bytes_;
      run["verified"] = true;
      run["bytes_per_second"] =
          1e9 * static_cast<double>(verified_bytes_) / static_cast<double>(took.count());
      run["p50_ns"] = latency_.p50();
      run["p90_ns"] = latency_.quantile(0.9);
      run["p99_ns"] = latency_.p99();
      if (skew_.size() > 0) {
        run["skew_p50_ns"] = skew_.p50();
        run["skew_p99_ns"] = skew_.p99();
      }
    }
    return run;
  }

  const ReplayConfig& config_;
  std::span<const TraceRequest> requests_;
  std::uint32_t shards_;
  std::unique_ptr<PrefixCache> cache_;
  std::vector<PatternPool> pools_;  // of the prefill ranks
  std::optional<PatternPool> decode_pool_;
  std::vector<LocalPage> free_pages_;  // of the decode rank
  std::vector<std::unique_ptr<PrefillRank>> prefill_;
  std::unique_ptr<DecodeRank> decode_;
  GroupId group_{};
  RunningMap running_;
  std::size_t next_{0}, ended_{0};
  std::uint64_t blocks_{0}, hit_blocks_{0}, tokens_{0}, verified_bytes_{0};
  std::uint64_t cached_blocks_{0}, evicted_{0};
  std::vector<std::uint32_t> peak_pages_;
  std::vector<std::pair<std::size_t, std::uint32_t>> curve_{{0, 0}};  // pages after requests
  Samples latency_, skew_;
};

}  // namespace

Result<Json> replay_trace(const ReplayConfig& config, std::span<const TraceRequest> requests) {
  if (config.page_size == 0 || kBlockTokens % config.page_size != 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("page_size {} does not divide a block of {} tokens", config.page_size,
                             kBlockTokens)};
  KVSHARD_TRY(auto sharded, Replay(config, requests, config.shards).run(config.pool_tokens, true));
  KVSHARD_TRY(auto unsharded, Replay(config, requests, 1).run(config.pool_tokens, true));
  Json replay{
      {"bench", "replay"},
      {"params",
       {{"trace", config.trace},
        {"shards", config.shards},
        {"pool_tokens", config.pool_tokens},
        {"page_size", config.page_size},
        {"in_flight", config.in_flight},
        {"layers", config.layers},
        {"head_bytes", config.head_bytes},
        {"slot_bytes", config.slot_bytes},
        {"slots", config.slots},
        {"transport", config.transport == TransportOptions::Kind::ucx ? "ucx" : "loopback"}}},
      {"pool_ratio",
       sharded["peak_pool_bytes"].get<double>() / unsharded["peak_pool_bytes"].get<double>()},
      {"env", environment(-1)}};
  // What an unsharded group caches in the memory that a sharded rank has; too little for some requests,
  // perhaps, and then for the trace.
  const auto small = Replay(config, requests, 1).run(config.pool_tokens / config.shards, false);
  replay["unsharded_same_memory"] = small ? *small : Json{{"refused", small.error().message}};
  replay["sharded"] = std::move(sharded);
  replay["unsharded"] = std::move(unsharded);
  return replay;
}

std::string replay_verdict(const Json& replay) {
  const auto shards = replay["params"]["shards"].get<std::uint32_t>();
  std::string text =
      fmt::format("{:>26} {:>10} {:>9} {:>13} {:>11} {:>9} {:>9} {:>9} {:>9}\n", "", "requests",
                  "hit rate", "pages a rank", "pool a rank", "moved", "p50", "p99", "skew p50");
  const auto row = [&](const std::string& name, const Json& run) {
    if (run.contains("refused")) {
      text += fmt::format("{:>26} {}\n", name, run["refused"].get<std::string>());
      return;
    }
    const auto peaks = run["peak_pages_by_rank"].get<std::vector<std::uint32_t>>();
    const auto [least, most] = std::ranges::minmax(peaks);
    const auto time = [&](const char* field) {
      return run.contains(field) ? human_time(run[field].get<std::int64_t>()) : "";
    };
    text += fmt::format("{:>26} {:>10} {:>7.2f} % {:>13} {:>11} {:>9} {:>9} {:>9} {:>9}\n", name,
                        run["requests"].get<std::size_t>(), 100 * run["hit_rate"].get<double>(),
                        least == most ? fmt::format("{}", most) : fmt::format("{}-{}", least, most),
                        human_bytes(run["peak_pool_bytes"].get<std::uint64_t>()),
                        run.contains("bytes") ? human_bytes(run["bytes"].get<std::uint64_t>()) : "",
                        time("p50_ns"), time("p99_ns"), time("skew_p50_ns"));
  };
  row(fmt::format("{} shards", shards), replay["sharded"]);
  row("unsharded", replay["unsharded"]);
  row("unsharded, that much a rank", replay["unsharded_same_memory"]);
  return text + fmt::format(
                    "every byte of every request verified; pool a rank at its peak is {:.3f} of "
                    "the unsharded one (1/{} is {:.3f})\n",
                    replay["pool_ratio"].get<double>(), shards, 1.0 / shards);
}

std::string replay_svg(const Json& replay) {
  Chart chart{.title = "KV pool of one rank while a recorded trace runs",
              .x_label = "requests",
              .y_label = "MB in use",
              .x_ticks = {},
              .x_text = [](double x) { return fmt::format("{:.0f}", x); },
              .series = {}};
  for (const auto& [name, run] :
       {std::pair{fmt::format("unsharded, {:.1f} % hits",
                              100 * replay["unsharded"]["hit_rate"].get<double>()),
                  &replay["unsharded"]},
        std::pair{
            fmt::format("{} shards, {:.1f} % hits", replay["params"]["shards"].get<std::uint32_t>(),
                        100 * replay["sharded"]["hit_rate"].get<double>()),
            &replay["sharded"]}}) {
    Chart::Series& line = chart.series.emplace_back();
    line.name = name;
    for (const Json& point : (*run)["curve"])
      line.points.emplace_back(point[0].get<double>(),
                               point[1].get<double>() * (*run)["page_bytes"].get<double>() / 1e6);
  }
  const double last = chart.series[0].points.back().first;
  for (int i = 0; i <= 4; ++i) chart.x_ticks.push_back(last * i / 4);
  return to_svg(chart);
}

}  // namespace kvshard::bench
