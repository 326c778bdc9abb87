// Whole pulls (publish, gather, fetch, scatter, commit) from N prefill rank processes, against bare UCX
// rendezvous of the same bytes between the same processes, alternating. Prints one JSON object a shape.
//
//   e2e_pull [N] [seconds per shape]

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/try.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/prefill_rank.hpp"
#include "support/ucx_baseline.hpp"

namespace kvshard::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLimit = std::chrono::seconds{60};
constexpr std::uint32_t kPages = 256;  // of the request
constexpr std::uint64_t kSlotBytes = 4U << 20;

struct Shape {
  std::uint32_t layers;
  std::uint32_t page_bytes;  // in one of a layer's two buffers

  [[nodiscard]] std::uint64_t request_bytes() const {
    return std::uint64_t{kPages} * layers * 2 * page_bytes;
  }
};
constexpr std::array kShapes{Shape{8, 4096}, Shape{16, 16384}, Shape{2, 128U << 10}};

// The pool of one rank, with random places for a request's pages and bytes that name their place.
class BenchPool {
 public:
  BenchPool(const Shape& shape, std::uint32_t page_count)
      : shape_{shape},
        memory_(shape.layers * 2,
                std::vector<std::byte>(std::size_t{page_count} * shape.page_bytes)),
        page_count_{page_count} {}

  Pool describe() {
    Pool pool{{.model_id = "bench",
               .groups = {{.layers = shape_.layers,
                           .buffers_per_layer = 2,
                           .element_type = ElementType::u8,
                           .heads = 1,
                           .head_bytes = shape_.page_bytes / 16,
                           .page_size = 16,
                           .page_count = page_count_}}},
              {{}}};
    for (auto& buffer : memory_) pool.buffers[0].push_back(buffer.data());
    return pool;
  }
  static std::byte expected(std::uint32_t position, std::size_t buffer, std::size_t at) {
    return static_cast<std::byte>(((position * 131U + buffer + 1) * (at + 7) * 0x9e3779b1U) >> 24);
  }
  void fill(LocalPage page, std::uint32_t position) {
    for (std::size_t b = 0; b < memory_.size(); ++b)
      for (std::size_t i = 0; i < shape_.page_bytes; ++i)
        memory_[b][index(page) * std::size_t{shape_.page_bytes} + i] = expected(position, b, i);
  }
  [[nodiscard]] bool holds(LocalPage page, std::uint32_t position) const {
    for (std::size_t b = 0; b < memory_.size(); ++b)
      for (std::size_t i = 0; i < shape_.page_bytes; ++i)
        if (memory_[b][index(page) * std::size_t{shape_.page_bytes} + i] !=
            expected(position, b, i))
          return false;
    return true;
  }

 private:
  Shape shape_;
  std::vector<std::vector<std::byte>> memory_;
  std::uint32_t page_count_;
};

// What the parent asks of a prefill process: publish a room, or serve the baseline until told otherwise.
struct Command {
  enum class What : std::uint32_t { publish, baseline, end } what;
  std::uint64_t room;
};

struct Hello {
  std::uint16_t port;
  std::uint32_t address_bytes;
  std::array<std::byte, 1024> address;  // of the baseline
};

std::vector<LogicalPage> request_pages(const PageAllocator& fresh) {
  PageAllocator allocator = fresh;
  std::vector<LogicalPage> pages(kPages);
  if (!allocator.draw_chain(pages)) std::abort();
  return pages;
}

PageAllocator make_allocator(std::uint32_t shards) {
  const auto layout = PageLayout::create(shards, 16);
  return *PageAllocator::create(*layout, kPages / shards + 8);
}

Status serve(const Shape& shape, std::uint32_t shards, std::uint32_t rank, int fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const PageAllocator allocator = make_allocator(shards);
  const std::vector<LogicalPage> pages = request_pages(allocator);
  BenchPool pool{shape, allocator.pages_per_rank() + 1};
  for (std::uint32_t i = 0; i < kPages; ++i) {
    const Placement place = allocator.layout().place(pages[i]);
    if (place.rank == rank) pool.fill(place.page, i);
  }
  PrefillOptions options;
  options.shard_rank = rank;
  options.shard_size = shards;
  options.pool = pool.describe();
  options.pool.geometry.groups[0].parts = shards;
  options.pool.geometry.groups[0].part = rank;
  options.slot_payload_bytes = kSlotBytes;
  KVSHARD_TRY(auto transport, make_transport({}));
  KVSHARD_TRY(auto engine, make_copy_engine({}));
  KVSHARD_TRY(auto prefill,
              PrefillRank::create(std::move(options), std::move(transport), std::move(engine)));
  std::vector<std::byte> memory(4 * kSlotBytes);
  KVSHARD_TRY(auto baseline, UcxBaseline::create(memory));
  Hello hello{.port = prefill->member().port, .address_bytes = 0, .address = {}};
  hello.address_bytes = static_cast<std::uint32_t>(baseline->address().size());
  std::copy(baseline->address().begin(), baseline->address().end(), hello.address.begin());
  (void)::send(fd, &hello, sizeof hello, MSG_NOSIGNAL);

  Command command{};
  bool in_baseline = false;
  for (std::uint32_t turn = 0;; ++turn) {
    const bool look =
        !in_baseline || turn % 4096 == 0;  // a system call a turn would slow the baseline
    if (look &&
        ::recv(fd, &command, sizeof command, in_baseline ? MSG_DONTWAIT : 0) == sizeof command) {
      if (command.what == Command::What::end) return {};
      in_baseline = command.what == Command::What::baseline;
      if (!in_baseline) {
        RoomEvent event;
        while (prefill->poll({&event, 1}) == 1) {
        }
        KVSHARD_TRY(prefill->open(RoomId{command.room}));
        KVSHARD_TRY(prefill->publish(RoomId{command.room}, {.pages = pages, .last = true}));
      }
    }
    if (in_baseline) baseline->progress();
  }
}

struct Rank {
  pid_t pid;
  int fd;
  std::unique_ptr<UcxBaseline> baseline;
  std::vector<std::byte> memory;
};

void tell(const std::vector<Rank>& ranks, Command command) {
  for (const Rank& rank : ranks) (void)::send(rank.fd, &command, sizeof command, MSG_NOSIGNAL);
}

Result<double> pull_once(DecodeRank& decode, GroupId group, std::vector<Rank>& ranks,
                         std::uint64_t room, const std::vector<LocalPage>& to) {
  const auto start = Clock::now();
  tell(ranks, {.what = Command::What::publish, .room = room});
  KVSHARD_TRY(decode.pull({.group = group, .room = RoomId{room}, .pages = to}));
  PullEvent event;
  while (decode.poll({&event, 1}) == 0) {
    pollfd fd{.fd = decode.event_fd(), .events = POLLIN, .revents = 0};
    (void)::poll(&fd, 1, 1000);
    if (Clock::now() - start > kLimit) return Error{ErrorCode::deadline_exceeded, "a pull hangs"};
  }
  if (!event.status) return event.status.error();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The same bytes, an equal share from each rank, in messages of a slot's size.
Result<double> bare_once(std::vector<Rank>& ranks, std::uint64_t bytes) {
  const std::uint64_t share = bytes / ranks.size();
  const std::uint64_t message = std::min(share, kSlotBytes);
  const auto start = Clock::now();
  for (Rank& rank : ranks) KVSHARD_TRY(rank.baseline->start(share / message, message, 4));
  for (bool done = false; !done;) {
    done = true;
    for (Rank& rank : ranks) {
      rank.baseline->progress();
      done = done && rank.baseline->landed() == share / message;
    }
    if (Clock::now() - start > kLimit)
      return Error{ErrorCode::deadline_exceeded, "the baseline hangs"};
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Status run_shape(const Shape& shape, std::uint32_t shards, double seconds) {
  std::vector<Rank> ranks;
  for (std::uint32_t rank = 0; rank < shards; ++rank) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) != 0)
      return Error{ErrorCode::internal, "socketpair"};
    const pid_t pid = ::fork();
    if (pid == 0) {
      const Status status = serve(shape, shards, rank, ends[1]);
      if (!status) fmt::print(stderr, "rank {}: {}\n", rank, status.error().message);
      ::_exit(status ? 0 : 1);
    }
    ranks.push_back({pid, ends[0], nullptr, {}});
  }
  const PageAllocator allocator = make_allocator(shards);
  BenchPool pool{shape, kPages + 1};
  DecodeOptions options;
  options.pool = pool.describe();
  options.landing_payload_bytes = kSlotBytes;
  KVSHARD_TRY(auto transport, make_transport({}));
  KVSHARD_TRY(auto engine, make_copy_engine({}));
  KVSHARD_TRY(auto decode,
              DecodeRank::create(std::move(options), std::move(transport), std::move(engine)));
  GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {}};
  for (std::uint32_t rank = 0; rank < shards; ++rank) {
    Hello hello{};
    if (::recv(ranks[rank].fd, &hello, sizeof hello, 0) != sizeof hello)
      return Error{ErrorCode::unavailable, "a rank did not start"};
    spec.members.push_back({rank, "127.0.0.1", hello.port, 0});
    ranks[rank].memory.resize(4 * kSlotBytes);
    KVSHARD_TRY(ranks[rank].baseline, UcxBaseline::create(ranks[rank].memory));
    KVSHARD_TRY(ranks[rank].baseline->connect(std::span{hello.address}.first(hello.address_bytes)));
  }
  KVSHARD_TRY(const GroupId group, decode->connect(spec, std::chrono::seconds{20}));
  KVSHARD_TRY(const PathReport path, decode->path(group, 0));

  // What one shard sends lands on neighbouring pages.
  const ClassMajorOrder order{allocator.layout(), Position{0}, kPages};
  std::vector<LocalPage> to(kPages);
  for (std::uint32_t i = 0; i < kPages; ++i) to[index(order.position(i))] = LocalPage{i + 1};

  std::uint64_t room = 0;
  KVSHARD_TRY(pull_once(*decode, group, ranks, ++room, to));
  bool verified = true;
  for (std::uint32_t i = 0; i < kPages; ++i) verified = verified && pool.holds(to[i], i);
  std::vector<double> ours;
  std::vector<double> bare;
  const auto start = Clock::now();
  while (ours.size() < 3 || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    KVSHARD_TRY(ours.emplace_back(), pull_once(*decode, group, ranks, ++room, to));
    tell(ranks, {.what = Command::What::baseline, .room = 0});
    KVSHARD_TRY(bare.emplace_back(), bare_once(ranks, shape.request_bytes()));
  }
  tell(ranks, {.what = Command::What::end, .room = 0});
  for (const Rank& rank : ranks) {
    ::waitpid(rank.pid, nullptr, 0);
    ::close(rank.fd);
  }
  std::sort(ours.begin(), ours.end());
  std::sort(bare.begin(), bare.end());
  const double ours_p50 = ours[ours.size() / 2];
  const double bare_p50 = bare[bare.size() / 2];
  const auto bytes = static_cast<double>(shape.request_bytes());
  fmt::print(
      "{{\"bench\":\"e2e_pull\",\"params\":{{\"shards\":{},\"pages\":{},\"layers\":{},\"page_"
      "bytes\":{},"
      "\"path\":\"{}\"}},\"bytes\":{:.0f},\"iterations\":{},\"p50_ns\":{:.0f},\"p99_ns\":{:.0f},"
      "\"bytes_per_second\":{:.4g},\"baseline\":{:.4g},\"ratio\":{:.3f},\"verified\":{}}}\n",
      shards, kPages, shape.layers, shape.page_bytes, to_string(path.path), bytes, ours.size(),
      1e9 * ours_p50, 1e9 * ours[ours.size() * 99 / 100], bytes / ours_p50, bytes / bare_p50,
      bare_p50 / ours_p50, verified);
  std::fflush(stdout);
  if (!verified) return Error{ErrorCode::data_loss, "wrong bytes"};
  return {};
}

int run(int argc, char** argv) {
  const auto shards = static_cast<std::uint32_t>(argc > 1 ? std::atoi(argv[1]) : 1);
  const double seconds = argc > 2 ? std::atof(argv[2]) : 3.0;
  for (const Shape& shape : kShapes) {
    // In a process of its own: UCX does not survive a fork.
    const pid_t pid = ::fork();
    if (pid == 0) {
      const Status status = run_shape(shape, shards, seconds);
      if (!status) fmt::print(stderr, "e2e_pull: {}\n", status.error().message);
      ::_exit(status ? 0 : 1);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvshard::bench

int main(int argc, char** argv) {
  return kvshard::bench::run(argc, argv);
}
