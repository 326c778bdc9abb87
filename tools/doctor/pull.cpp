#include "doctor/pull.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/try.hpp"
#include "bench/device.hpp"
#include "bench/pool.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/transport.hpp"

namespace kvshard::doctor {
namespace {

using bench::PageContent;
using bench::PatternPool;
using namespace std::chrono_literals;

constexpr const char* kGroup = "kvshard-doctor";
constexpr RoomId kRoom{1};
constexpr std::uint32_t kPages = 64;  // 32 MiB
constexpr auto kConnectLimit = 5s;
constexpr auto kPullLimit = 10s;
constexpr int kPulls = 5;
constexpr int kRoundTrips = 21;

Geometry geometry() {
  BufferGroup group;
  group.layers = 8;
  group.heads = 8;
  group.head_bytes = 256;
  group.page_size = 16;
  group.page_count = kPages + 1;
  return {.model_id = kGroup, .groups = {group}};
}

std::vector<PageContent> content() {
  std::vector<PageContent> pages;
  for (std::uint32_t p = 1; p <= kPages; ++p) pages.push_back({LocalPage{p}, p});
  return pages;
}

MemoryKind kind_of(const std::string& memory) {
  return memory == "cuda" ? MemoryKind::cuda : MemoryKind::host;
}

struct Parts {
  std::unique_ptr<PatternPool> pool;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<CopyEngine> engine;
};

// What a rank of either side is made of. `device` is of no matter for host memory.
Result<Parts> make_parts(MemoryKind memory, int device) {
  if (memory == MemoryKind::host) device = -1;
  KVSHARD_TRY(bench::use_device(device));
  Parts parts;
  KVSHARD_TRY(auto pool, PatternPool::create(geometry(), memory, device));
  parts.pool = std::make_unique<PatternPool>(std::move(pool));
  KVSHARD_TRY(parts.transport, make_transport({.cuda_device = device}));
  KVSHARD_TRY(parts.engine,
              make_copy_engine({.memory = memory, .cuda_device = std::max(device, 0)}));
  return parts;
}

Result<PullEvent> wait_for_event(DecodeRank& rank) {
  PullEvent event;
  pollfd ready{.fd = rank.event_fd(), .events = POLLIN, .revents = 0};
  // The pull has a deadline of its own, so that an event comes.
  while (rank.poll({&event, 1}) == 0) (void)::poll(&ready, 1, 100);
  KVSHARD_TRY(event.status);
  return event;
}

Result<Hello> read_hello(const PullEvent& event) {
  if (event.side_data.empty())
    return Error{ErrorCode::data_loss, "the peer says nothing of itself"};
  const auto& bytes = event.side_data[0].bytes;
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  try {
    return nlohmann::json::parse(text, text + bytes.size()).get<Hello>();
  } catch (const nlohmann::json::exception& error) {
    return Error{ErrorCode::data_loss,
                 fmt::format("what the peer says of itself: {}", error.what())};
  }
}

Status measure_pull(const PullTask& task, const SecurityOptions& security, Pulled& result) {
  KVSHARD_TRY(Parts parts, make_parts(kind_of(task.to_memory), task.cuda_device));
  KVSHARD_TRY(parts.pool->fill({}));
  DecodeOptions options;
  options.pool = parts.pool->describe();
  options.mapped = task.mapped ? Mapped::always : Mapped::never;
  options.security = security;
  KVSHARD_TRY(const auto rank, DecodeRank::create(std::move(options), std::move(parts.transport),
                                                  std::move(parts.engine)));
  const GroupSpec group{.name = kGroup,
                        .members = {{.host = task.from.host, .port = task.from.port}}};
  KVSHARD_TRY(const GroupId connected, rank->connect(group, kConnectLimit));

  std::vector<LocalPage> pages;
  for (std::uint32_t p = 1; p <= kPages; ++p) pages.push_back(LocalPage{p});
  const PullRequest whole{
      .group = connected, .room = kRoom, .pages = pages, .deadline = kPullLimit};
  for (int i = 0; i < kPulls; ++i) {
    KVSHARD_TRY(rank->pull(whole));
    KVSHARD_TRY(const PullEvent event, wait_for_event(*rank));
    if (i == 0) {
      KVSHARD_TRY(parts.pool->check(content()));
      KVSHARD_TRY(result.hello, read_hello(event));
    }
    result.measure.path = to_string(event.path);
    result.measure.gigabytes_per_s =
        std::max(result.measure.gigabytes_per_s,
                 static_cast<double>(event.bytes) / static_cast<double>(event.total.count()));
  }
  KVSHARD_TRY(const PathReport report, rank->path(connected, 0));
  result.measure.reason = report.reason;

  // A pull of nothing is PULL and READY, COMMIT and VALID.
  PullRequest nothing = whole;
  nothing.pages = {};
  nothing.first_position = kPages;
  std::vector<double> times;
  for (int i = 0; i < kRoundTrips; ++i) {
    KVSHARD_TRY(rank->pull(nothing));
    KVSHARD_TRY(const PullEvent event, wait_for_event(*rank));
    times.push_back(static_cast<double>(event.total.count()) / 2e3);
  }
  std::ranges::nth_element(times, times.begin() + kRoundTrips / 2);
  result.measure.round_trip_us = times[kRoundTrips / 2];
  return {};
}

}  // namespace

/// Members in the order in which they outlive each other.
struct Served::Rank {
  std::unique_ptr<PatternPool> pool;
  std::unique_ptr<PrefillRank> rank;

  static Result<std::shared_ptr<Rank>> start(MemoryKind memory, const Address& listen,
                                             const SecurityOptions& security) {
    KVSHARD_TRY(Parts parts, make_parts(memory, 0));
    KVSHARD_TRY(parts.pool->fill(content()));
    PrefillOptions options;
    options.group = kGroup;
    options.pool = parts.pool->describe();
    options.listen_host = listen.host;
    options.listen_port = listen.port;
    options.security = security;
    options.lease = std::chrono::hours{24 * 365};  // as long as we are asked
    auto made = std::make_shared<Rank>();
    made->pool = std::move(parts.pool);
    KVSHARD_TRY(made->rank, PrefillRank::create(std::move(options), std::move(parts.transport),
                                                std::move(parts.engine)));
    return made;
  }

  Status publish(const Hello& hello) {
    std::vector<LogicalPage> pages;
    for (std::uint32_t p = 1; p <= kPages; ++p) pages.push_back(LogicalPage{p});
    const std::string text = nlohmann::json(hello).dump();
    KVSHARD_TRY(rank->open(kRoom, UINT32_MAX));
    return rank->publish(
        kRoom, {.pages = pages, .last = true, .side_data = std::as_bytes(std::span{text})});
  }
};

Result<Served> Served::start(const Address& listen, const SecurityOptions& security,
                             const Facts& facts) {
  Served served;
  Hello hello{.facts = facts};
  KVSHARD_TRY(served.ranks_.emplace_back(), Rank::start(MemoryKind::host, listen, security));
  if (!facts.cuda.gpus.empty()) {
    auto gpu = Rank::start(MemoryKind::cuda, {listen.host, 0}, security);
    if (gpu) {
      hello.cuda_port = (*gpu)->rank->member().port;
      served.ranks_.push_back(*gpu);
    } else {
      hello.cuda_error = gpu.error().message;
    }
  }
  for (const auto& rank : served.ranks_) KVSHARD_TRY(rank->publish(hello));
  return served;
}

std::uint16_t Served::port() const {
  return ranks_[0]->rank->member().port;
}

Pulled pull(const PullTask& task, const SecurityOptions& security) {
  Pulled result;
  result.measure.from = task.from_memory;
  result.measure.to = task.to_memory;
  result.measure.mapped = task.mapped;
  if (const Status status = measure_pull(task, security, result); !status)
    result.measure.error = status.error().message;
  return result;
}

}  // namespace kvshard::doctor
