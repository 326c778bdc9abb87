#include <poll.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "demo/device_pool.hpp"
#include "demo/rank_setup.hpp"
#include "demo/roles.hpp"
#include "demo/socket_peers.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/plan.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/registry.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/model.hpp"

namespace demo {
namespace {

using namespace kvshard;

class PrefillEngine {
 public:
  static Result<std::unique_ptr<PrefillEngine>> create(const RoleOptions& options,
                                                       Channel& channel) {
    KVSHARD_TRY(auto peers, SocketPeers::accept(channel, options.rank, options.shard_size));
    KVSHARD_TRY(auto model, tiny_llm::Model::load(options.model));
    KVSHARD_TRY(auto pool, tiny_llm::KvPool::create(model.config().kv_shape(), options.page_size,
                                                    options.pool_pages + 1));
    KVSHARD_TRY(const auto layout, PageLayout::create(options.shard_size, options.page_size));
    KVSHARD_TRY(auto allocator, PageAllocator::create(layout, options.pool_pages));
    std::unique_ptr<PrefillEngine> made{new PrefillEngine{options, std::move(peers),
                                                          std::move(model), std::move(pool), layout,
                                                          std::move(allocator)}};
    KVSHARD_TRY(auto backends, make_backends(options));
    PrefillOptions rank;
    rank.group = options.group;
    rank.epoch = options.epoch;
    rank.shard_rank = options.rank;
    rank.shard_size = options.shard_size;
    if (options.memory == "cuda") {
      KVSHARD_TRY(made->device_, DevicePool::create(made->pool_));
    }
    rank.pool = made->device_ ? made->device_->describe(made->model_.id())
                              : made->pool_.describe(made->model_.id());
    const auto geometries = prefill_geometries(made->model_, options);
    rank.pool.geometry = geometries[options.rank];
    KVSHARD_TRY(const auto pullers,
                count_pullers(geometries, decode_geometries(made->model_, options)));
    made->pullers_ = pullers[options.rank];
    KVSHARD_TRY(made->trace_,
                tools::RankTrace::create(options.trace, trace_name(options, "prefill")));
    rank.tracer = made->trace_.tracer();
    KVSHARD_TRY(made->rank_, PrefillRank::create(std::move(rank), std::move(backends.transport),
                                                 std::move(backends.engine)));
    KVSHARD_TRY(made->registry_, make_registry(options.registry));
    KVSHARD_TRY(made->announcement_,
                Announcement::start(*made->registry_, made->rank_->announcement(),
                                    std::chrono::seconds{20}));
    return made;
  }

  // Every rank of the group makes the same draws and frees in the same order, and so holds the same pages.
  //
  // Context parallel: a rank runs the tokens on the pages that it owns, from the embedding to the last layer,
  // and in each layer all ranks gather each other's keys and values of the tokens in progress. Weights are
  // replicated. Pages take turns, so early and late tokens, cheap and dear ones, are on all ranks alike.
  Status prefill(RoomId room, const std::vector<tiny_llm::Token>& prompt) {
    std::vector<LogicalPage> pages(layout_.pages_for(prompt.size()));
    KVSHARD_TRY(allocator_.draw_chain(pages));
    chains_[room] = pages;
    KVSHARD_TRY(auto cache, tiny_llm::ShardedPrefillKv::create(pool_, layout_, peers_, pages));
    KVSHARD_TRY(rank_->open(room, pullers_));
    std::vector<float> logits;
    std::size_t published = 0;  // pages
    for (std::size_t done = 0; done < prompt.size();) {
      const std::size_t take = std::min<std::size_t>(options_.chunk_tokens, prompt.size() - done);
      KVSHARD_TRY(logits, model_.forward(std::span{prompt}.subspan(done, take), done, cache));
      done += take;
      const bool last = done == prompt.size();
      const std::size_t whole = last ? pages.size() : done / layout_.page_size();
      if (device_)
        KVSHARD_TRY(upload_owned(std::span{pages}.subspan(published, whole - published)));
      Chunk chunk{.pages = std::span{pages}.subspan(published, whole - published),
                  .first_position = static_cast<std::uint32_t>(published),
                  .last = last};
      chunk.side_data = last ? std::as_bytes(std::span{logits}) : std::span<const std::byte>{};
      KVSHARD_TRY(rank_->publish(room, chunk));
      published = whole;
    }
    return {};
  }

  Status free(RoomId room) {
    const auto chain = chains_.extract(room);
    if (chain.empty()) return Error{ErrorCode::invalid_argument, "no such room"};
    return allocator_.free_chain(chain.mapped());
  }

  PrefillRank& rank() { return *rank_; }

 private:
  Status upload_owned(std::span<const LogicalPage> pages) {
    std::vector<LocalPage> owned;
    for (const LogicalPage page : pages) {
      const Placement place = layout_.place(page);
      if (place.rank == options_.rank) owned.push_back(place.page);
    }
    return device_->upload(owned);
  }

  PrefillEngine(const RoleOptions& options, SocketPeers peers, tiny_llm::Model model,
                tiny_llm::KvPool pool, const PageLayout& layout, PageAllocator allocator)
      : options_{options},
        peers_{std::move(peers)},
        model_{std::move(model)},
        pool_{std::move(pool)},
        layout_{layout},
        allocator_{std::move(allocator)} {}

  RoleOptions options_;
  SocketPeers peers_;
  tiny_llm::Model model_;
  tiny_llm::KvPool pool_;
  std::unique_ptr<DevicePool> device_;  // with --memory cuda
  PageLayout layout_;
  PageAllocator allocator_;
  std::unordered_map<RoomId, std::vector<LogicalPage>> chains_;
  std::uint32_t pullers_{0};
  tools::RankTrace trace_;
  std::unique_ptr<PrefillRank> rank_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<Announcement> announcement_;
};

}  // namespace

int run_prefill(const RoleOptions& options, Channel& channel) {
  auto made = PrefillEngine::create(options, channel);
  if (!made) return give_up(channel, made.error().message);
  PrefillEngine& engine = **made;
  if (!channel.send({{"ready", true}})) return 1;
  for (;;) {
    std::array<pollfd, 2> fds{{{.fd = channel.fd(), .events = POLLIN, .revents = 0},
                               {.fd = engine.rank().event_fd(), .events = POLLIN, .revents = 0}}};
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    RoomEvent event;
    while (engine.rank().poll({&event, 1}) == 1) {
      Json message{{"released", index(event.room)}};
      if (!event.status) message["error"] = event.status.error().message;
      if (!channel.send(message)) return 0;
    }
    if ((fds[0].revents & (POLLIN | POLLHUP)) == 0) continue;
    const auto message = channel.receive();
    if (!message) return 0;  // the parent is done with us
    const RoomId room{(*message)["room"].get<std::uint64_t>()};
    const Status status =
        (*message)["op"] == "free"
            ? engine.free(room)
            : engine.prefill(room, (*message)["prompt"].get<std::vector<tiny_llm::Token>>());
    if (!status) return give_up(channel, status.error().message);
  }
}

}  // namespace demo
