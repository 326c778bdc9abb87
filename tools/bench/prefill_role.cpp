#include <poll.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/try.hpp"
#include "bench/backends.hpp"
#include "bench/device.hpp"
#include "bench/roles.hpp"
#include "bench/workload.hpp"
#include "kvshard/prefill_rank.hpp"
#include "support/rank_trace.hpp"

namespace kvshard::bench {
namespace {

class PrefillSide {
 public:
  static Result<std::unique_ptr<PrefillSide>> create(const Json& start) {
    const auto config = start["config"].get<PullConfig>();
    const auto rank = start["rank"].get<std::uint32_t>();
    const auto decode_ranks = start["decode_ranks"].get<std::uint32_t>();
    const int device = config.device(false, rank);
    KVSHARD_TRY(use_device(device));
    KVSHARD_TRY(auto workload, Workload::create(config));
    const Geometry& geometry = workload.prefill()[rank];
    KVSHARD_TRY(auto pool, PatternPool::create(geometry, config.memory_kind(), device));
    KVSHARD_TRY(pool.fill(workload.prefill_content(rank)));
    std::unique_ptr<PrefillSide> made{
        new PrefillSide{config, std::move(workload), std::move(pool)}};
    made->pullers_ = start["pullers"].get<std::uint32_t>();
    PrefillOptions options;
    options.shard_rank = rank;
    options.shard_size = config.prefill_ranks();
    options.pool = made->pool_.describe();
    options.slot_payload_bytes = config.slot_bytes;
    options.slots = config.slots * decode_ranks;
    if (config.mapped_piece_bytes != 0) options.mapped_piece_bytes = config.mapped_piece_bytes;
    options.busy_poll = std::chrono::microseconds{config.busy_poll_us};
    KVSHARD_TRY(made->trace_, tools::RankTrace::create(start["trace"].get<std::string>(),
                                                       fmt::format("prefill {}", rank)));
    options.tracer = made->trace_.tracer();
    KVSHARD_TRY(auto backends, make_backends(config, device));
    KVSHARD_TRY(made->rank_, PrefillRank::create(std::move(options), std::move(backends.transport),
                                                 std::move(backends.engine)));
    if (!config.baselines) return made;
    KVSHARD_TRY(made->slots_, make_staging_memory(config.memory_kind(), std::max(device, 0),
                                                  config.slots * config.slot_bytes));
    KVSHARD_TRY(fill_bytes(config.memory_kind(), made->slots_->bytes().data(), 1,
                           made->slots_->bytes().size()));
    for (std::uint32_t i = 0; i < decode_ranks; ++i) {
      KVSHARD_TRY(auto baseline, UcxBaseline::create(made->slots_->bytes(), made->pool_.bytes(),
                                                     config.memory_kind()));
      made->baselines_.push_back(std::move(baseline));
    }
    return made;
  }

  [[nodiscard]] Json describe() const {
    Json remotes = Json::array();
    for (const auto& baseline : baselines_) remotes.push_back(to_json(baseline->remote()));
    return {{"port", rank_->member().port}, {"remotes", std::move(remotes)}};
  }

  Status publish(std::uint64_t first_room) {
    RoomEvent event;
    while (rank_->poll({&event, 1}) == 1) KVSHARD_TRY(event.status);
    if (pullers_ == 0) return {};  // other ranks hold the same, and are asked
    for (std::uint32_t request = 0; request < workload_.requests(); ++request) {
      const RoomId room{first_room + request};
      KVSHARD_TRY(rank_->open(room, pullers_));
      const auto pages = workload_.source(request);
      const std::size_t chunk =
          config_.chunk_tokens == 0
              ? pages.size()
              : std::max<std::size_t>(1, config_.chunk_tokens / config_.page_size);
      for (std::size_t first = 0; first < pages.size(); first += chunk) {
        const std::size_t count = std::min(chunk, pages.size() - first);
        KVSHARD_TRY(rank_->publish(room, {.pages = pages.subspan(first, count),
                                          .first_position = static_cast<std::uint32_t>(first),
                                          .last = first + count == pages.size()}));
      }
    }
    return {};
  }

  // Until there is another message. A system call a turn would slow the baseline, so it looks now and then.
  void serve_baseline(int fd) {
    for (std::uint32_t turn = 0;; ++turn) {
      std::size_t events = 0;
      for (const auto& baseline : baselines_) events += baseline->progress();
      if (turn % 1024 == 0) {
        pollfd message{.fd = fd, .events = POLLIN, .revents = 0};
        if (::poll(&message, 1, 0) == 1) return;
      }
      if (events == 0) std::this_thread::yield();
    }
  }

 private:
  PrefillSide(const PullConfig& config, Workload workload, PatternPool pool)
      : config_{config}, workload_{std::move(workload)}, pool_{std::move(pool)} {}

  PullConfig config_;
  Workload workload_;
  PatternPool pool_;
  std::uint32_t pullers_{1};
  std::unique_ptr<StagingMemory> slots_;
  std::vector<std::unique_ptr<UcxBaseline>> baselines_;  // one for each decode rank
  tools::RankTrace trace_;
  std::unique_ptr<PrefillRank> rank_;
};

}  // namespace

int run_prefill(Channel& channel) {
  const auto start = channel.receive();
  if (!start) return 1;
  auto made = PrefillSide::create(*start);
  if (!made) return give_up(channel, made.error());
  if (!channel.send((*made)->describe())) return 1;
  for (;;) {
    const auto message = channel.receive();
    if (!message) return 0;  // the parent is done with us
    if ((*message)["op"] == "publish") {
      const Status status = (*made)->publish((*message)["first_room"].get<std::uint64_t>());
      if (!status) return give_up(channel, status.error());
    }
    if (!channel.send(Json::object())) return 1;
    if ((*message)["op"] == "baseline") (*made)->serve_baseline(channel.fd());
  }
}

}  // namespace kvshard::bench
