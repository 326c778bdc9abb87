// Fetches slots from an owner in another process, against a bare UCX rendezvous of the same bytes between
// the same two processes, alternating. Prints one JSON object a shape.
//
//   micro_ucx_fetch [automatic|get|am] [seconds per shape]

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "base/try.hpp"
#include "bench/ucx_baseline.hpp"
#include "kvshard/transport.hpp"

namespace kvshard::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMemory = 64U << 20;
constexpr auto kLimit = std::chrono::seconds{60};

std::byte expected(std::size_t at) {
  return static_cast<std::byte>((at * 0x9E3779B97F4A7C15ULL) >> 56);
}

Status send_bytes(int fd, std::span<const std::byte> bytes) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  if (::write(fd, &size, sizeof size) != sizeof size ||
      ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    return Error{ErrorCode::internal, "pipe broke"};
  return {};
}
Result<std::vector<std::byte>> receive_bytes(int fd) {
  std::uint32_t size = 0;
  if (::read(fd, &size, sizeof size) != sizeof size)
    return Error{ErrorCode::internal, "pipe broke"};
  std::vector<std::byte> bytes(size);
  if (::read(fd, bytes.data(), size) != static_cast<ssize_t>(size))
    return Error{ErrorCode::internal, "pipe broke"};
  return bytes;
}

Status run_owner(int fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<std::byte> memory(kMemory);
  for (std::size_t i = 0; i < kMemory; ++i) memory[i] = expected(i);
  KVSHARD_TRY(auto transport, make_transport({}));
  KVSHARD_TRY(auto registered, transport->register_memory(memory, MemoryKind::host));
  KVSHARD_TRY(transport->serve(*registered));
  KVSHARD_TRY(auto baseline, UcxBaseline::create(memory));
  KVSHARD_TRY(send_bytes(fd, transport->address()));
  KVSHARD_TRY(send_bytes(fd, registered->packed()));
  KVSHARD_TRY(send_bytes(fd, baseline->remote().address));
  for (;;) {  // until killed
    // Yielding matters only where other work wants the cores, and then helps both sides alike.
    if (transport->progress() + baseline->progress() == 0) std::this_thread::yield();
  }
}

class Counter final : public TransferListener {
 public:
  void transfer_done(Status status) noexcept override {
    ++done;
    if (!status && !failure.has_value()) failure = status.error();
  }
  std::uint64_t done{0};
  std::optional<Error> failure;
};
class Ignore final : public EndpointListener {
 public:
  void endpoint_failed(Error) noexcept override {}
};

struct Decode {
  std::vector<std::byte> memory;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<RegisteredMemory> registered;
  std::unique_ptr<Endpoint> endpoint;
  std::unique_ptr<UcxBaseline> baseline;

  Result<double> ours(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth) {
    Counter counter;
    std::uint64_t started = 0;
    const auto start = Clock::now();
    while (counter.done < count) {
      while (started < count && started - counter.done < depth) {
        const auto at = (started % depth) * bytes;
        KVSHARD_TRY(endpoint->fetch(at, std::span{memory}.subspan(at, bytes), counter));
        ++started;
      }
      if (transport->progress() == 0) std::this_thread::yield();
      if (Clock::now() - start > kLimit) return Error{ErrorCode::deadline_exceeded, "fetches hang"};
    }
    if (counter.failure.has_value()) return *counter.failure;
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  Result<double> bare(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth) {
    const auto start = Clock::now();
    KVSHARD_TRY(baseline->start(count, bytes, depth));
    while (baseline->landed() < count) {
      if (baseline->progress() == 0) std::this_thread::yield();
      if (Clock::now() - start > kLimit)
        return Error{ErrorCode::deadline_exceeded, "baseline hangs"};
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  [[nodiscard]] bool exact(std::uint64_t bytes) const {
    for (std::size_t i = 0; i < bytes; ++i)
      if (memory[i] != expected(i)) return false;
    return true;
  }
};

Status run_decode(int fd, TransferPath path, double seconds) {
  Decode decode;
  Ignore ignore;
  decode.memory.resize(kMemory);
  KVSHARD_TRY(decode.transport, make_transport({.path = path}));
  KVSHARD_TRY(decode.registered,
              decode.transport->register_memory(decode.memory, MemoryKind::host));
  KVSHARD_TRY(decode.baseline, UcxBaseline::create(decode.memory));
  KVSHARD_TRY(const auto address, receive_bytes(fd));
  KVSHARD_TRY(const auto packed, receive_bytes(fd));
  KVSHARD_TRY(const auto baseline_address, receive_bytes(fd));
  KVSHARD_TRY(decode.endpoint, decode.transport->connect(address, packed, ignore));
  KVSHARD_TRY(decode.baseline->connect({.address = baseline_address, .slots = {}, .pool = {}}));
  Counter probed;
  KVSHARD_TRY(decode.endpoint->probe(decode.memory, probed));
  while (probed.done == 0) decode.transport->progress();
  if (probed.failure.has_value()) return *probed.failure;
  fmt::print(stderr, "{}\n", decode.endpoint->path().reason);

  struct Shape {
    std::uint64_t bytes;
    std::uint64_t depth;
  };
  for (const auto& [bytes, depth] : {Shape{64U << 10, 1}, Shape{64U << 10, 8}, Shape{1U << 20, 4},
                                     Shape{4U << 20, 1}, Shape{4U << 20, 4}, Shape{16U << 20, 3}}) {
    const std::uint64_t count = std::max<std::uint64_t>(depth * 4, (32U << 20) / bytes);
    std::fill(decode.memory.begin(), decode.memory.end(), std::byte{0});
    KVSHARD_TRY(decode.ours(depth, bytes, depth));
    bool verified = decode.exact(bytes * depth);
    std::fill(decode.memory.begin(), decode.memory.end(), std::byte{0});
    KVSHARD_TRY(decode.bare(depth, bytes, depth));
    verified = verified && decode.exact(bytes * depth);
    std::vector<double> ours;
    std::vector<double> bare;
    const auto start = Clock::now();
    while (ours.size() < 3 ||
           std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
      KVSHARD_TRY(ours.emplace_back(), decode.ours(count, bytes, depth));
      KVSHARD_TRY(bare.emplace_back(), decode.bare(count, bytes, depth));
    }
    std::sort(ours.begin(), ours.end());
    std::sort(bare.begin(), bare.end());
    const auto rate = [&](double took) { return static_cast<double>(bytes * count) / took; };
    const auto ours_p50 = ours[ours.size() / 2];
    const auto bare_p50 = bare[bare.size() / 2];
    fmt::print(
        "{{\"bench\":\"ucx_fetch\",\"params\":{{\"path\":\"{}\",\"slot_bytes\":{},\"in_flight\":{}}"
        "},"
        "\"bytes\":{},\"iterations\":{},\"p50_ns\":{:.0f},\"p99_ns\":{:.0f},\"bytes_per_second\":{:"
        ".4g},"
        "\"baseline\":{:.4g},\"ratio\":{:.3f},\"verified\":{}}}\n",
        to_string(decode.endpoint->path().path), bytes, depth, bytes * count, ours.size(),
        1e9 * ours_p50 / static_cast<double>(count),
        1e9 * ours[ours.size() * 99 / 100] / static_cast<double>(count), rate(ours_p50),
        rate(bare_p50), bare_p50 / ours_p50, verified);
    std::fflush(stdout);
    if (!verified) return Error{ErrorCode::data_loss, "wrong bytes"};
  }
  decode.endpoint->close();
  while (!decode.endpoint->closed()) decode.transport->progress();
  decode.endpoint.reset();
  return {};
}

int run(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "automatic";
  const auto path = name == "get"  ? TransferPath::get
                    : name == "am" ? TransferPath::am
                                   : TransferPath::automatic;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 2.0;
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return 1;
  const auto child = ::fork();  // before UCX is used: it does not survive a fork
  if (child == 0) {
    const auto status = run_owner(ends[1]);
    fmt::print(stderr, "owner: {}\n", status ? "ended" : status.error().message);
    std::_Exit(1);
  }
  ::close(ends[1]);
  const auto status = run_decode(ends[0], path, seconds);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (!status)
    fmt::print(stderr, "{}: {}\n", to_string(status.error().code), status.error().message);
  return status ? 0 : 1;
}

}  // namespace
}  // namespace kvshard::bench

int main(int argc, char** argv) {
  return kvshard::bench::run(argc, argv);
}
