// How an engine links and calls kvshard: two prefill ranks and a decode rank in one process. The code
// blocks of docs/integration.md are taken from here.
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kvshard/bootstrap.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/log.hpp"
#include "kvshard/metrics.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/tracer.hpp"

namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kShards = 2;
constexpr std::uint32_t kPageSize = 16;     // tokens
constexpr std::uint32_t kUsablePages = 64;  // of each rank
constexpr std::uint32_t kLayers = 4;
constexpr std::uint32_t kPageBytes = kPageSize * 2 * 64;

// An error ends this example; an engine looks at code() and sheds load, retries or fails the request.
template <typename T>
T must(kvshard::Result<T> result) {
  if (result) {
    if constexpr (!std::is_void_v<T>)
      return std::move(result).value();
    else
      return;
  }
  std::fprintf(stderr, "%s: %s\n", std::string{to_string(result.error().code)}.c_str(),
               result.error().message.c_str());
  std::exit(1);
}

void wait_readable(int fd) {
  pollfd waiting{.fd = fd, .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, 30'000) != 1) std::exit(1);
}

// The engine's own KV memory: K and V of each layer, page after page.
struct KvMemory {
  KvMemory() : bytes(kLayers * 2, std::vector<std::byte>((kUsablePages + 1) * kPageBytes)) {}

  // [pool]
  kvshard::Pool describe() {
    kvshard::Pool pool;
    pool.geometry.model_id = "my-model@rev7";
    pool.geometry.groups = {{.name = "kv",
                             .layers = kLayers,
                             .buffers_per_layer = 2,  // K and V
                             .element_type = kvshard::ElementType::bf16,
                             .heads = 2,
                             .head_bytes = 64,  // 32 elements of two bytes
                             .page_size = kPageSize,
                             .page_count = kUsablePages + 1}};  // page 0 is padding
    std::vector<std::byte*> starts;
    for (auto& buffer : bytes)
      starts.push_back(buffer.data());  // layer 0's K, V, layer 1's K, V, ...
    pool.buffers = {starts};
    return pool;
  }
  // [pool]

  std::vector<std::vector<std::byte>> bytes;
};

}  // namespace

int main(int argc, char** argv) {
  const bool ucx = argc > 1 && std::strcmp(argv[1], "ucx") == 0;
  const kvshard::TransportOptions transport{.kind =
                                                ucx ? kvshard::TransportOptions::Kind::ucx
                                                    : kvshard::TransportOptions::Kind::loopback};
  // [log]
  kvshard::set_log_level(kvshard::LogLevel::info);
  kvshard::set_log_hook(
      [](void*, kvshard::LogLevel, std::string_view line) noexcept {
        std::fprintf(stderr, "engine log: %.*s\n", static_cast<int>(line.size()), line.data());
      },
      nullptr);
  // [log]

  // [trace]
  std::shared_ptr<kvshard::Tracer> tracer;  // null: nothing is traced
  const char* const trace_file = std::getenv("ENGINE_TRACE");
  if (trace_file != nullptr) tracer = must(kvshard::Tracer::create({.process = "engine"}));
  // [trace]

  std::vector<KvMemory> shard_memory(kShards);
  std::vector<std::unique_ptr<kvshard::PrefillRank>> prefill;
  for (std::uint32_t rank = 0; rank < kShards; ++rank) {
    KvMemory& memory = shard_memory[rank];
    // [prefill create]
    kvshard::PrefillOptions options;
    options.group = "prefill-a";
    options.epoch = 1;  // a new number whenever the group is launched anew
    options.shard_rank = rank;
    options.shard_size = kShards;
    options.pool = memory.describe();
    options.pool.geometry.groups[0].parts = kShards;  // the rank holds every kShards-th page
    options.pool.geometry.groups[0].part = rank;
    options.listen_host = "127.0.0.1";
    options.tracer = tracer;
    auto served = must(kvshard::PrefillRank::create(std::move(options),
                                                    must(kvshard::make_transport(transport)),
                                                    must(kvshard::make_copy_engine({}))));
    // [prefill create]
    prefill.push_back(std::move(served));
  }

  KvMemory decode_memory;
  // [decode create]
  kvshard::DecodeOptions options;
  options.pool = decode_memory.describe();
  options.tracer = tracer;
  auto decode =
      must(kvshard::DecodeRank::create(std::move(options), must(kvshard::make_transport(transport)),
                                       must(kvshard::make_copy_engine({}))));

  // By hand here; wait_for_group() asks a registry.
  kvshard::GroupSpec group{.name = "prefill-a", .epoch = 1, .members = {}};
  for (const auto& rank : prefill) group.members.push_back(rank->member());
  const kvshard::GroupId connected = must(decode->connect(group, 10s));
  // [decode create]
  std::printf("path: %s\n", must(decode->path(connected, 0)).reason.c_str());

  // [admit]
  const auto layout = must(kvshard::PageLayout::create(kShards, kPageSize));
  auto allocator = must(kvshard::PageAllocator::create(layout, kUsablePages));
  const auto capacity = must(kvshard::CapacityCheck::create(layout, kUsablePages * kPageSize,
                                                            {kvshard::AdmissionRule::normal()}));
  const std::uint64_t prompt_tokens = 500;
  must(capacity.check_intake(prompt_tokens));  // invalid_argument: an HTTP 400 to the user
  must(capacity.check_now(prompt_tokens,
                          allocator.admissible_tokens()));  // resource_exhausted: wait in the queue

  std::vector<kvshard::LogicalPage> chain(layout.pages_for(prompt_tokens));
  must(allocator.draw_chain(chain));  // the same on every rank
  // [admit]

  const kvshard::RoomId room{42};
  std::vector<kvshard::LocalPage> pages(chain.size());
  for (std::uint32_t i = 0; i < pages.size(); ++i) pages[i] = kvshard::LocalPage{i + 1};
  // [pull]
  must(decode->pull({.group = connected,
                     .room = room,
                     .pages = pages,  // where positions 0, 1, ... go
                     .deadline = 20s}));
  // [pull]

  for (std::uint32_t rank = 0; rank < kShards; ++rank) must(prefill[rank]->open(room));
  constexpr std::size_t kChunkPages = 10;
  for (std::size_t done = 0; done < chain.size(); done += kChunkPages) {
    const auto now = std::span{chain}.subspan(done, std::min(kChunkPages, chain.size() - done));
    for (std::uint32_t rank = 0; rank < kShards; ++rank) {
      // Stands for the forward pass: this rank writes the pages that it owns.
      for (std::size_t i = 0; i < now.size(); ++i) {
        const kvshard::Placement place = layout.place(now[i]);
        if (place.rank != rank) continue;
        for (auto& buffer : shard_memory[rank].bytes)
          std::memset(buffer.data() + index(place.page) * kPageBytes,
                      static_cast<int>(done + i + 1), kPageBytes);
      }
      // [publish]
      const std::string first_token = "token 1234";
      kvshard::Chunk chunk{.pages = now, .first_position = static_cast<std::uint32_t>(done)};
      chunk.last = done + now.size() == chain.size();
      if (chunk.last && rank == 0) chunk.side_data = std::as_bytes(std::span{first_token});
      must(prefill[rank]->publish(room,
                                  chunk));  // every rank, also one that owns none of these pages
      // [publish]
    }
  }

  // [decode done]
  wait_readable(decode->event_fd());
  kvshard::PullEvent pulled;
  while (decode->poll({&pulled, 1}) == 0) {
  }
  std::printf("%s\n", summarize(pulled).c_str());
  must(pulled.status);  // ok: every byte is in its page, and was valid to the end
  // [decode done]
  for (std::size_t i = 0; i < pages.size(); ++i) {
    for (const auto& buffer : decode_memory.bytes) {
      if (buffer[index(pages[i]) * kPageBytes] != static_cast<std::byte>(i + 1)) return 1;
    }
  }

  // [prefill done]
  for (const auto& rank : prefill) {
    wait_readable(rank->event_fd());
    kvshard::RoomEvent ended;
    while (rank->poll({&ended, 1}) == 0) {
    }
    must(ended.status);  // otherwise why the room failed; its pages are free either way
  }
  must(allocator.free_chain(chain));
  // [prefill done]

  // [metrics]
  const kvshard::DecodeMetrics metrics = decode->metrics();
  for (const kvshard::SourceMetrics& source : metrics.sources) {
    std::printf("rank %u: by %s, %llu bytes, half of its pieces in less than %lld us on the wire\n",
                source.shard_rank, std::string{to_string(source.path.path)}.c_str(),
                static_cast<unsigned long long>(source.bytes),
                static_cast<long long>(source.wire.quantile(0.5).count() / 1'000));
  }
  if (tracer != nullptr) must(tracer->write(trace_file));
  // [metrics]
  std::printf("ok\n");
  return 0;
}
