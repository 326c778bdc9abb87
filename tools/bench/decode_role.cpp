#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/try.hpp"
#include "bench/backends.hpp"
#include "bench/device.hpp"
#include "bench/roles.hpp"
#include "bench/workload.hpp"
#include "kvshard/decode_rank.hpp"
#include "support/rank_trace.hpp"

namespace kvshard::bench {
namespace {

using Clock = std::chrono::steady_clock;  // the same in all processes of a host
constexpr auto kLimit = std::chrono::seconds{60};
constexpr std::uint64_t kOperationsInFlight = 32;
constexpr std::uint64_t kMaxCopyBytes = 1U << 30;

class DecodeSide {
 public:
  static Result<std::unique_ptr<DecodeSide>> create(const Json& start) {
    const auto config = start["config"].get<PullConfig>();
    const auto rank = start["rank"].get<std::uint32_t>();
    const int device = config.device(true, rank);
    KVSHARD_TRY(use_device(device));
    KVSHARD_TRY(auto workload, Workload::create(config));
    const Geometry& geometry = workload.decode()[rank];
    KVSHARD_TRY(auto pool, PatternPool::create(geometry, config.memory_kind(), device));
    KVSHARD_TRY(pool.fill({}));
    std::unique_ptr<DecodeSide> made{new DecodeSide{config, std::move(workload), std::move(pool)}};
    DecodeOptions options;
    options.pool = made->pool_.describe();
    options.landing_payload_bytes = config.slot_bytes;
    options.landing_slots = config.slots * config.prefill_ranks();
    options.window = config.window;
    options.mapped = config.path == "auto"     ? Mapped::automatic
                     : config.path == "mapped" ? Mapped::always
                                               : Mapped::never;
    options.busy_poll = std::chrono::microseconds{config.busy_poll_us};
    KVSHARD_TRY(made->trace_, tools::RankTrace::create(start["trace"].get<std::string>(),
                                                       fmt::format("decode {}", rank)));
    options.tracer = made->trace_.tracer();
    KVSHARD_TRY(auto backends, make_backends(config, device));
    KVSHARD_TRY(made->rank_, DecodeRank::create(std::move(options), std::move(backends.transport),
                                                std::move(backends.engine)));
    GroupSpec group{.name = "kvshard", .epoch = 1, .members = {}};
    for (const Json& port : start["ports"])
      group.members.push_back({.shard_rank = static_cast<std::uint32_t>(group.members.size()),
                               .host = "127.0.0.1",
                               .port = port.get<std::uint16_t>()});
    KVSHARD_TRY(made->group_, made->rank_->connect(group, std::chrono::seconds{30}));
    if (config.baselines) KVSHARD_TRY(made->connect_baselines(start["remotes"], device));
    return made;
  }

  [[nodiscard]] Result<Json> describe() const {
    Json paths = Json::array();
    for (std::uint32_t source = 0; source < config_.prefill_ranks(); ++source) {
      KVSHARD_TRY(const PathReport path, rank_->path(group_, source));
      paths.push_back({{"path", to_string(path.path)},
                       {"get_native", path.get_native},
                       {"get_gigabytes_per_s", path.get_gigabytes_per_s},
                       {"am_gigabytes_per_s", path.am_gigabytes_per_s},
                       {"reason", path.reason}});
    }
    return Json{{"paths", std::move(paths)}};
  }

  Result<Json> run(const Json& message) {
    const auto op = message["op"].get<std::string>();
    if (op == "pull") return pull(message["first_room"].get<std::uint64_t>());
    if (op == "check") {
      const Status status = pool_.check(workload_.decode_content());
      return status ? Json::object() : Json{{"wrong", status.error().message}};
    }
    if (op == "memcpy") return copy();
    if (op == "bare") return bare();
    return pages();
  }

 private:
  DecodeSide(const PullConfig& config, Workload workload, PatternPool pool)
      : config_{config}, workload_{std::move(workload)}, pool_{std::move(pool)} {}

  Status connect_baselines(const Json& remotes, int device) {
    const MemoryKind kind = config_.memory_kind();
    const int on = std::max(device, 0);
    KVSHARD_TRY(slots_, make_staging_memory(kind, on, config_.slots * config_.slot_bytes));
    copied_bytes_ = std::min(workload_.bytes_per_decode_rank(), kMaxCopyBytes);
    KVSHARD_TRY(copy_from_, make_staging_memory(kind, on, copied_bytes_));
    KVSHARD_TRY(copy_to_, make_staging_memory(kind, on, copied_bytes_));
    KVSHARD_TRY(fill_bytes(kind, copy_from_->bytes().data(), 1, copied_bytes_));
    for (const Json& remote : remotes) {
      KVSHARD_TRY(auto baseline, UcxBaseline::create(slots_->bytes(), pool_.bytes(), kind));
      KVSHARD_TRY(baseline->connect(remote_from(remote)));
      baselines_.push_back(std::move(baseline));
    }
    return {};
  }

  Result<Json> pull(std::uint64_t first_room) {
    const auto begin = Clock::now();
    for (std::uint32_t request = 0; request < workload_.requests(); ++request)
      KVSHARD_TRY(rank_->pull({.group = group_,
                               .room = RoomId{first_room + request},
                               .pages = workload_.destination(request)}));
    std::vector<PullEvent> events(workload_.requests());
    std::size_t ended = 0;
    const auto sleep = begin + std::chrono::microseconds{config_.busy_poll_us};
    while ((ended += rank_->poll(std::span{events}.subspan(ended))) < events.size()) {
      if (Clock::now() < sleep) continue;
      pollfd fd{.fd = rank_->event_fd(), .events = POLLIN, .revents = 0};
      (void)::poll(&fd, 1, 1000);
    }
    Json answer = span_of(begin, Clock::now());
    std::uint64_t bytes = 0;
    Json pulls = Json::array();
    for (const PullEvent& event : events) {
      if (!event.status) return event.status.error();
      bytes += event.bytes;
      Json sources = Json::array();
      for (const SourceTiming& source : event.sources)
        sources.push_back({{"rank", source.shard_rank},
                           {"bytes", source.bytes},
                           {"first_ready_ns", source.first_ready.count()},
                           {"landed_ns", source.landed.count()},
                           {"wire_ns", source.wire.count()}});
      pulls.push_back({{"total_ns", event.total.count()},
                       {"path", to_string(event.path)},
                       {"sources", std::move(sources)}});
    }
    answer["bytes"] = bytes;
    answer["pulls"] = std::move(pulls);
    return answer;
  }

  // The same bytes from memory to memory of the kind, beside each other.
  Result<Json> copy() {
    const std::uint64_t bytes = workload_.bytes_per_decode_rank();
    std::uint64_t operations = 0;
    const auto begin = Clock::now();
    for (std::uint64_t done = 0; done < bytes; done += copied_bytes_, ++operations)
      KVSHARD_TRY(copy_bytes(config_.memory_kind(), copy_to_->bytes().data(),
                             copy_from_->bytes().data(), std::min(copied_bytes_, bytes - done)));
    return with_count(span_of(begin, Clock::now()), bytes, operations);
  }

  // The same bytes, an equal share from each rank, in messages of a slot's size at most.
  Result<Json> bare() {
    const std::uint64_t share = workload_.bytes_per_decode_rank() / baselines_.size();
    const std::uint64_t count = (share + config_.slot_bytes - 1) / config_.slot_bytes;
    const std::uint64_t bytes = share / count;
    KVSHARD_TRY(const PathReport path, rank_->path(group_, 0));
    const auto begin = Clock::now();
    if (path.path == TransferPath::am) {
      for (const auto& baseline : baselines_)
        KVSHARD_TRY(baseline->start(count, bytes, config_.slots));
      KVSHARD_TRY(
          progress_until([&](UcxBaseline& baseline) { return baseline.landed() == count; }));
    } else {
      KVSHARD_TRY(get_all(count, config_.slots, [&](UcxBaseline& baseline, std::uint64_t i) {
        const std::uint64_t at = i % config_.slots * bytes;
        return baseline.get(UcxBaseline::Region::slots, at, slots_->bytes().subspan(at, bytes));
      }));
    }
    return with_count(span_of(begin, Clock::now()), bytes * count * baselines_.size(),
                      count * baselines_.size());
  }

  // One get for each page and buffer (or head slice of a token), from pool to pool.
  Result<Json> pages() {
    const std::uint64_t fragment = workload_.fragment_bytes();
    const std::uint64_t all = workload_.bytes_per_decode_rank() / fragment;
    const std::uint64_t count = std::max<std::uint64_t>(
        1, std::min<std::uint64_t>(all, config_.page_operations) / baselines_.size());
    const std::uint64_t from = workload_.prefill()[0].groups[0].page_bytes() *
                               workload_.prefill()[0].groups[0].page_count *
                               workload_.prefill()[0].groups[0].buffers() / fragment;
    const std::uint64_t to = pool_.bytes().size() / fragment;
    std::mt19937_64 random{7};
    const auto begin = Clock::now();
    KVSHARD_TRY(get_all(count, kOperationsInFlight, [&](UcxBaseline& baseline, std::uint64_t) {
      return baseline.get(UcxBaseline::Region::pool, random() % from * fragment,
                          pool_.bytes().subspan(random() % to * fragment, fragment));
    }));
    Json answer = with_count(span_of(begin, Clock::now()), fragment * count * baselines_.size(),
                             count * baselines_.size());
    answer["all_operations"] = all;
    answer["operation_bytes"] = fragment;
    return answer;
  }

  // Issues get(baseline, i) for i < count on each baseline, `depth` at a time.
  template <typename Get>
  Status get_all(std::uint64_t count, std::uint64_t depth, const Get& get) {
    std::unordered_map<UcxBaseline*, std::pair<std::uint64_t, std::uint64_t>> issued;
    for (const auto& baseline : baselines_) issued[baseline.get()] = {0, baseline->landed()};
    Status failed;
    KVSHARD_TRY(progress_until([&](UcxBaseline& baseline) {
      auto& [started, landed_before] = issued[&baseline];
      const std::uint64_t landed = baseline.landed() - landed_before;
      while (failed && started < count && started - landed < depth)
        failed = get(baseline, started++);
      return !failed || landed == count;
    }));
    return failed;
  }

  template <typename Done>
  Status progress_until(const Done& done) {
    const auto begin = Clock::now();
    for (;;) {
      bool all = true;
      std::size_t events = 0;
      for (const auto& baseline : baselines_) {
        events += baseline->progress();
        KVSHARD_TRY(baseline->status());
        all = done(*baseline) && all;
      }
      if (all) return {};
      if (events == 0) {
        if (Clock::now() - begin > kLimit)
          return Error{ErrorCode::deadline_exceeded, "the UCX baseline hangs"};
        std::this_thread::yield();  // with fewer cores than processes the sender needs this one
      }
    }
  }

  static Json span_of(Clock::time_point begin, Clock::time_point end) {
    return {{"begin_ns", std::chrono::nanoseconds{begin.time_since_epoch()}.count()},
            {"end_ns", std::chrono::nanoseconds{end.time_since_epoch()}.count()}};
  }
  static Json with_count(Json answer, std::uint64_t bytes, std::uint64_t operations) {
    answer["bytes"] = bytes;
    answer["operations"] = operations;
    return answer;
  }

  PullConfig config_;
  Workload workload_;
  PatternPool pool_;
  std::unique_ptr<StagingMemory> slots_, copy_from_, copy_to_;
  std::uint64_t copied_bytes_{0};
  std::vector<std::unique_ptr<UcxBaseline>> baselines_;  // one for each prefill rank
  tools::RankTrace trace_;
  std::unique_ptr<DecodeRank> rank_;
  GroupId group_{};
};

}  // namespace

int run_decode(Channel& channel) {
  const auto start = channel.receive();
  if (!start) return 1;
  auto made = DecodeSide::create(*start);
  if (!made) return give_up(channel, made.error());
  Result<Json> answer = (*made)->describe();
  for (;;) {
    if (!answer) return give_up(channel, answer.error());
    if (!channel.send(*answer)) return 1;
    const auto message = channel.receive();
    if (!message) return 0;
    answer = (*made)->run(*message);
  }
}

}  // namespace kvshard::bench
