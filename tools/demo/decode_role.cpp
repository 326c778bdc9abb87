#include <poll.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>

#include "demo/device_pool.hpp"
#include "demo/rank_setup.hpp"
#include "demo/roles.hpp"
#include "demo/socket_peers.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/page_layout.hpp"
#include "kvshard/registry.hpp"
#include "tiny_llm/generate.hpp"
#include "tiny_llm/kv.hpp"
#include "tiny_llm/model.hpp"

namespace demo {
namespace {

using namespace kvshard;

class DecodeEngine {
 public:
  static Result<std::unique_ptr<DecodeEngine>> create(const RoleOptions& options,
                                                      Channel& channel) {
    KVSHARD_TRY(auto joined, SocketPeers::accept(channel, options.rank, options.decode_tp));
    auto peers = std::make_unique<SocketPeers>(std::move(joined));
    KVSHARD_TRY(auto model, tiny_llm::Model::load(options.model, peers.get()));
    KVSHARD_TRY(auto pool, tiny_llm::KvPool::create(model.kv_shape(), options.page_size,
                                                    options.pool_pages + 1));
    std::unique_ptr<DecodeEngine> made{
        new DecodeEngine{std::move(peers), std::move(model), std::move(pool)}};
    for (std::uint32_t page = options.pool_pages; page > 0; --page)
      made->free_pages_.push_back(LocalPage{page});
    KVSHARD_TRY(made->layout_, PageLayout::create(options.shard_size, options.page_size));
    KVSHARD_TRY(auto backends, make_backends(options));
    DecodeOptions rank;
    if (options.memory == "cuda") {
      KVSHARD_TRY(made->device_, DevicePool::create(made->pool_));
    }
    rank.pool = made->device_ ? made->device_->describe(made->model_.id())
                              : made->pool_.describe(made->model_.id());
    rank.mapped = mapped(options);
    rank.pool.geometry = decode_geometries(made->model_, options)[options.rank];
    KVSHARD_TRY(made->trace_,
                tools::RankTrace::create(options.trace, trace_name(options, "decode")));
    rank.tracer = made->trace_.tracer();
    KVSHARD_TRY(made->rank_, DecodeRank::create(std::move(rank), std::move(backends.transport),
                                                std::move(backends.engine)));
    KVSHARD_TRY(auto registry, make_registry(options.registry));
    KVSHARD_TRY(const GroupSpec group,
                wait_for_group(*registry, options.group, std::chrono::seconds{20}));
    KVSHARD_TRY(made->group_, made->rank_->connect(group, std::chrono::seconds{20}));
    return made;
  }

  struct Request {
    std::uint64_t room;
    std::size_t prompt_tokens;
    std::size_t count;  // tokens to decode
    bool damage;        // spoil one page after it has landed
    std::vector<LocalPage> pages;
    PullId pull{};
    std::optional<PullEvent> event;  // its pull has ended
  };

  Status start(Request request) {
    const auto prompt_pages = static_cast<std::uint32_t>(layout_->pages_for(request.prompt_tokens));
    const std::uint64_t all_pages = layout_->pages_for(request.prompt_tokens + request.count);
    if (all_pages > free_pages_.size()) {
      return Error{ErrorCode::resource_exhausted, "decode needs " + std::to_string(all_pages) +
                                                      " pages, has " +
                                                      std::to_string(free_pages_.size())};
    }
    // What one shard sends lands on neighbouring pages.
    std::vector<LocalPage> taken{free_pages_.end() - static_cast<std::ptrdiff_t>(all_pages),
                                 free_pages_.end()};
    free_pages_.resize(free_pages_.size() - all_pages);
    std::reverse(taken.begin(), taken.end());
    request.pages = taken;
    const ClassMajorOrder order{*layout_, Position{0}, prompt_pages};
    for (std::uint32_t i = 0; i < prompt_pages; ++i)
      request.pages[index(order.position(i))] = taken[i];
    KVSHARD_TRY(request.pull, rank_->pull({.group = group_,
                                           .room = RoomId{request.room},
                                           .pages = std::span{request.pages}.first(prompt_pages),
                                           .deadline = std::chrono::seconds{60}}));
    running_.push_back(std::move(request));
    return {};
  }

  void take(PullEvent event) {
    const auto request = std::ranges::find(running_, event.pull, &Request::pull);
    request->event = std::move(event);
  }

  // Pulls end in any order, and in another one on each rank; ranks that compute together must all take
  // the same request, so they take them in the order in which they were told.
  [[nodiscard]] bool can_finish() const { return !running_.empty() && running_.front().event; }

  Json finish() {
    Request request = std::move(running_.front());
    running_.pop_front();
    const PullEvent& event = *request.event;
    Json answer{{"room", request.room}, {"summary", summarize(event)}};
    const auto decoded = decode(request, event);
    for (const LocalPage page : request.pages) free_pages_.push_back(page);
    if (!decoded) {
      answer["error"] = decoded.error().message;
      return answer;
    }
    std::uint64_t wire_ns = 0;
    for (const SourceTiming& source : event.sources)
      wire_ns += static_cast<std::uint64_t>(source.wire.count());
    answer["tokens"] = decoded->tokens;
    answer["logits"] = Json::binary(
        {reinterpret_cast<const std::uint8_t*>(decoded->logits.data()),
         reinterpret_cast<const std::uint8_t*>(decoded->logits.data() + decoded->logits.size())});
    answer["bytes"] = event.bytes;
    answer["wire_ns"] = wire_ns;
    answer["first_token_ns"] = first_token_.time_since_epoch().count();
    answer["path"] = to_string(event.path);
    return answer;
  }

  DecodeRank& rank() { return *rank_; }

 private:
  DecodeEngine(std::unique_ptr<SocketPeers> peers, tiny_llm::Model model, tiny_llm::KvPool pool)
      : peers_{std::move(peers)}, model_{std::move(model)}, pool_{std::move(pool)} {}

  // The prompt's last logits came beside its pages: they give the first token.
  Result<tiny_llm::Generated> decode(const Request& request, const PullEvent& event) {
    if (!event.status) return event.status.error();
    std::vector<float> logits(model_.config().vocab);
    if (event.side_data.size() != 1 ||
        event.side_data[0].bytes.size() != logits.size() * sizeof(float))
      return Error{ErrorCode::data_loss, "the first token's logits did not come"};
    std::memcpy(logits.data(), event.side_data[0].bytes.data(), event.side_data[0].bytes.size());
    first_token_ = std::chrono::steady_clock::now();
    if (device_) {
      const std::size_t prompt_pages = layout_->pages_for(request.prompt_tokens);
      KVSHARD_TRY(device_->download(std::span{request.pages}.first(prompt_pages)));
    }
    if (request.damage) {
      for (float& value :
           pool_.page(0, request.pages[request.prompt_tokens / layout_->page_size() / 2]))
        value = -value;
    }
    KVSHARD_TRY(auto cache, tiny_llm::PagedKv::create(pool_, request.pages));
    return tiny_llm::generate_greedy(model_, cache, request.prompt_tokens, logits, request.count);
  }

  std::unique_ptr<SocketPeers> peers_;  // the model keeps a pointer to it
  tiny_llm::Model model_;
  tiny_llm::KvPool pool_;
  std::unique_ptr<DevicePool> device_;  // with --memory cuda
  std::optional<PageLayout> layout_;
  std::vector<LocalPage> free_pages_;
  tools::RankTrace trace_;
  std::unique_ptr<DecodeRank> rank_;
  GroupId group_{};
  std::deque<Request> running_;
  std::chrono::steady_clock::time_point first_token_;
};

}  // namespace

int run_decode(const RoleOptions& options, Channel& channel) {
  auto made = DecodeEngine::create(options, channel);
  if (!made) return give_up(channel, made.error().message);
  DecodeEngine& engine = **made;
  if (!channel.send({{"ready", true}})) return 1;
  for (;;) {
    std::array<pollfd, 2> fds{{{.fd = channel.fd(), .events = POLLIN, .revents = 0},
                               {.fd = engine.rank().event_fd(), .events = POLLIN, .revents = 0}}};
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    PullEvent event;
    while (engine.rank().poll({&event, 1}) == 1) engine.take(std::move(event));
    while (engine.can_finish()) {
      if (!channel.send(engine.finish())) return 0;
    }
    if ((fds[0].revents & (POLLIN | POLLHUP)) == 0) continue;
    const auto message = channel.receive();
    if (!message) return 0;
    const Json& request = *message;
    const Status status =
        engine.start({.room = request["room"].get<std::uint64_t>(),
                      .prompt_tokens = request["prompt_tokens"].get<std::size_t>(),
                      .count = request["count"].get<std::size_t>(),
                      .damage = request["damage"].get<bool>(),
                      .pages = {},
                      .event = {}});
    if (!status) return give_up(channel, status.error().message);
  }
}

}  // namespace demo
