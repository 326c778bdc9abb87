#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvshard/transport.hpp"

// What every transport does. A test file includes this and instantiates TransportConformance with the
// options of its transport.
namespace kvshard::testing {

using namespace std::chrono_literals;

/// Far above what anything here takes, also on a machine under load and under a sanitizer.
inline constexpr auto kTransportLimit = 60s;

/// Byte `i` of the memory of the owner with number `seed`.
inline std::byte pattern(std::uint64_t seed, std::uint64_t i) {
  return static_cast<std::byte>(((i + seed * 0x9E37U) * 0x9E3779B97F4A7C15ULL) >> 56);
}

class HeardTransfer final : public TransferListener {
 public:
  void transfer_done(Status status) noexcept override {
    ++calls;
    last = std::move(status);
    if (then) then();
  }
  [[nodiscard]] bool done() const { return calls > 0; }

  int calls{0};
  Status last;
  std::function<void()> then;
};

class HeardFailure final : public EndpointListener {
 public:
  void endpoint_failed(Error error) noexcept override {
    ++calls;
    last = std::move(error);
    if (then) then();
  }

  int calls{0};
  Error last;
  std::function<void()> then;
};

/// Called with its seed before a rank's transport is made, where the two sides need different devices.
inline std::function<void(std::uint64_t seed)> before_rank;

/// A rank with registered memory. As an owner it serves it, filled with its pattern; as a decode rank it
/// lands there.
class TransportRank {
 public:
  TransportRank(const TransportOptions& options, std::size_t bytes, std::uint64_t seed = 0)
      : bytes_(bytes), seed_{seed} {
    if (before_rank) before_rank(seed);
    auto made = make_transport(options);
    if (!made) throw std::runtime_error(made.error().message);
    transport_ = std::move(*made);
    auto memory = transport_->register_memory(bytes_, MemoryKind::host);
    if (!memory) throw std::runtime_error(memory.error().message);
    memory_ = std::move(*memory);
  }

  void serve() {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = pattern(seed_, i);
    const auto served = transport_->serve(*memory_);
    ASSERT_TRUE(served) << served.error().message;
  }
  std::unique_ptr<Endpoint> connect(const TransportRank& owner, EndpointListener& listener) {
    auto made = transport_->connect(owner.transport().address(), owner.memory().packed(), listener);
    EXPECT_TRUE(made) << made.error().message;
    return made ? std::move(*made) : nullptr;
  }
  [[nodiscard]] Transport& transport() const { return *transport_; }
  [[nodiscard]] RegisteredMemory& memory() const { return *memory_; }
  [[nodiscard]] std::span<std::byte> bytes() { return bytes_; }
  [[nodiscard]] std::uint64_t seed() const { return seed_; }

 private:
  std::vector<std::byte> bytes_;
  std::uint64_t seed_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<RegisteredMemory> memory_;
};

/// Progresses all of `ranks` until `done`; false when the limit passes first.
inline bool pump(std::initializer_list<TransportRank*> ranks, const std::function<bool()>& done,
                 std::chrono::nanoseconds limit = kTransportLimit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    for (auto* rank : ranks)
      if (rank != nullptr) rank->transport().progress();
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

/// Waits on the transport's descriptor alone; false when nothing comes within the limit.
inline bool wait_for_activity(Transport& transport,
                              std::chrono::milliseconds limit = kTransportLimit) {
  if (!transport.arm()) return true;
  pollfd ready{.fd = transport.wake_fd(), .events = POLLIN, .revents = 0};
  return ::poll(&ready, 1, static_cast<int>(limit.count())) == 1;
}

class TransportConformance : public ::testing::TestWithParam<TransportOptions> {
 protected:
  static constexpr std::size_t kMiB = 1U << 20;

  /// Connects and probes, or fails the test.
  std::unique_ptr<Endpoint> open(TransportRank& decode, TransportRank& owner,
                                 EndpointListener& listener) {
    auto endpoint = decode.connect(owner, listener);
    if (endpoint == nullptr) return nullptr;
    HeardTransfer probed;
    const auto started = endpoint->probe(decode.bytes(), probed);
    EXPECT_TRUE(started) << started.error().message;
    EXPECT_TRUE(pump({&decode, &owner}, [&] { return probed.done(); }));
    EXPECT_TRUE(probed.last) << probed.last.error().message;
    EXPECT_EQ(endpoint->in_flight(), 0U);
    return endpoint;
  }
  void close(TransportRank& decode, std::initializer_list<TransportRank*> owners,
             Endpoint& endpoint) {
    endpoint.close();
    EXPECT_TRUE(pump({&decode}, [&] {
      for (auto* owner : owners) owner->transport().progress();
      return endpoint.closed();
    }));
  }
};

TEST_P(TransportConformance, DeliversExactBytesOfEverySizeAndOffset) {
  constexpr std::size_t kSize = 16 * kMiB + 64;
  constexpr auto kCanary = std::byte{0xC7};
  TransportRank owner{GetParam(), kSize, 1};
  TransportRank decode{GetParam(), kSize + 64};
  owner.serve();
  HeardFailure failure;
  const auto endpoint = open(decode, owner, failure);
  ASSERT_NE(endpoint, nullptr);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{64}, std::size_t{4095},
        std::size_t{4096}, std::size_t{65537}, kMiB, kMiB + 13, 16 * kMiB}) {
    for (const std::size_t offset :
         {std::size_t{0}, std::size_t{1}, std::size_t{17}, kSize - size}) {
      if (offset > kSize - size) continue;
      std::fill(decode.bytes().begin(), decode.bytes().end(), kCanary);
      const auto local = decode.bytes().subspan(32 + offset % 2, size);
      HeardTransfer heard;
      ASSERT_TRUE(endpoint->fetch(offset, local, heard));
      ASSERT_TRUE(pump({&decode, &owner}, [&] { return heard.done(); }));
      ASSERT_TRUE(heard.last) << heard.last.error().message;
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < size; ++i) wrong += local[i] != pattern(1, offset + i) ? 1U : 0U;
      ASSERT_EQ(wrong, 0U) << size << " bytes at " << offset;
      ASSERT_EQ(local.data()[-1], kCanary);
      ASSERT_EQ(local.data()[size], kCanary);
      ASSERT_EQ(heard.calls, 1);
    }
  }
  close(decode, {&owner}, *endpoint);
  EXPECT_EQ(failure.calls, 0);
}

TEST_P(TransportConformance, ProbeReportsThePathInUse) {
  TransportRank owner{GetParam(), kMiB, 1};
  TransportRank decode{GetParam(), kMiB};
  owner.serve();
  HeardFailure failure;
  auto endpoint = decode.connect(owner, failure);
  HeardTransfer early;
  const auto refused = endpoint->fetch(0, decode.bytes().first(8), early);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::failed_precondition);
  HeardTransfer probed;
  ASSERT_TRUE(endpoint->probe(decode.bytes(), probed));
  EXPECT_EQ(endpoint->in_flight(), 1U);
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return probed.done(); }));
  ASSERT_TRUE(probed.last) << probed.last.error().message;
  const auto& report = endpoint->path();
  EXPECT_NE(report.path, TransferPath::automatic);
  if (GetParam().path != TransferPath::automatic) {
    EXPECT_EQ(report.path, GetParam().path);
  }
  EXPECT_GT(report.get_gigabytes_per_s + report.am_gigabytes_per_s, 0);
  EXPECT_NE(report.reason.find("GB/s"), std::string::npos) << report.reason;
  EXPECT_EQ(early.calls, 0);
  EXPECT_EQ(probed.calls, 1);
  close(decode, {&owner}, *endpoint);
}

TEST_P(TransportConformance, SeveralOwnersAndSeveralEndpointsToOne) {
  constexpr std::size_t kSize = 256U << 10;
  constexpr std::size_t kOwners = 3;
  std::deque<TransportRank> owners;
  for (std::size_t i = 0; i < kOwners; ++i) owners.emplace_back(GetParam(), kSize, i + 1).serve();
  TransportRank decode{GetParam(), 2 * kOwners * kSize};
  HeardFailure failure;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (std::size_t i = 0; i < 2 * kOwners; ++i)
    endpoints.push_back(open(decode, owners[i % kOwners], failure));
  const auto all = {&decode, &owners[0], &owners[1], &owners[2]};
  std::deque<HeardTransfer> heard(endpoints.size());
  for (std::size_t i = 0; i < endpoints.size(); ++i)
    ASSERT_TRUE(endpoints[i]->fetch(0, decode.bytes().subspan(i * kSize, kSize), heard[i]));
  ASSERT_TRUE(pump(all, [&] {
    return std::all_of(heard.begin(), heard.end(), [](auto& h) { return h.done(); });
  }));
  for (std::size_t i = 0; i < endpoints.size(); ++i) {
    EXPECT_TRUE(heard[i].last) << heard[i].last.error().message;
    for (std::size_t at = 0; at < kSize; at += 997)
      ASSERT_EQ(decode.bytes()[i * kSize + at], pattern(i % kOwners + 1, at)) << i;
  }
  // Closing one endpoint leaves the other to the same owner working.
  close(decode, {&owners[0], &owners[1], &owners[2]}, *endpoints[0]);
  endpoints[0].reset();
  HeardTransfer after;
  ASSERT_TRUE(endpoints[kOwners]->fetch(5, decode.bytes().first(kSize - 5), after));
  ASSERT_TRUE(pump(all, [&] { return after.done(); }));
  EXPECT_TRUE(after.last) << after.last.error().message;
  EXPECT_EQ(decode.bytes()[0], pattern(1, 5));
  EXPECT_EQ(failure.calls, 0);
  for (auto& endpoint : endpoints)
    if (endpoint) close(decode, {&owners[0], &owners[1], &owners[2]}, *endpoint);
}

TEST_P(TransportConformance, ManyFetchesAtOnceEndOnceEach) {
  constexpr std::size_t kFetches = 128;
  constexpr std::size_t kSize = 48U << 10;
  TransportRank owner{GetParam(), kFetches * kSize, 9};
  TransportRank decode{GetParam(), kFetches * kSize};
  owner.serve();
  HeardFailure failure;
  const auto endpoint = open(decode, owner, failure);
  std::deque<HeardTransfer> heard(kFetches);
  std::fill(decode.bytes().begin(), decode.bytes().end(), std::byte{0});
  for (std::size_t i = 0; i < kFetches; ++i)
    ASSERT_TRUE(endpoint->fetch(i * kSize, decode.bytes().subspan(i * kSize, kSize), heard[i]));
  EXPECT_EQ(endpoint->in_flight(), kFetches);
  EXPECT_EQ(std::count_if(heard.begin(), heard.end(), [](auto& h) { return h.done(); }), 0)
      << "a listener ran inside fetch()";
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return endpoint->in_flight() == 0; }));
  for (auto& one : heard) {
    EXPECT_EQ(one.calls, 1);
    EXPECT_TRUE(one.last) << one.last.error().message;
  }
  EXPECT_TRUE(std::equal(decode.bytes().begin(), decode.bytes().end(), owner.bytes().begin()));
  close(decode, {&owner}, *endpoint);
}

TEST_P(TransportConformance, RefusesWhatIsOutOfRange) {
  constexpr std::size_t kSize = 4096;
  TransportRank owner{GetParam(), kSize, 1};
  TransportRank decode{GetParam(), 2 * kSize};
  owner.serve();
  HeardFailure failure;
  const auto endpoint = open(decode, owner, failure);
  HeardTransfer heard;
  const std::uint64_t top = ~std::uint64_t{0};
  for (const auto& [offset, size] : std::vector<std::pair<std::uint64_t, std::size_t>>{
           {0, kSize + 1}, {kSize, 1}, {kSize + 1, 0}, {top, 1}, {top - 7, 16}, {1, kSize}}) {
    const auto status = endpoint->fetch(offset, decode.bytes().first(size), heard);
    ASSERT_FALSE(status) << offset << ' ' << size;
    EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  }
  EXPECT_EQ(endpoint->in_flight(), 0U);
  EXPECT_EQ(heard.calls, 0);
  ASSERT_TRUE(endpoint->fetch(kSize, decode.bytes().first(0), heard));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return heard.done(); }));
  EXPECT_TRUE(heard.last);
  close(decode, {&owner}, *endpoint);
}

TEST_P(TransportConformance, RefusesDamagedAddressAndMemory) {  // acceptance 42
  TransportRank owner{GetParam(), 4096, 1};
  TransportRank decode{GetParam(), 4096};
  owner.serve();
  HeardFailure failure;
  const std::vector<std::byte> address{owner.transport().address().begin(),
                                       owner.transport().address().end()};
  const std::vector<std::byte> packed{owner.memory().packed().begin(),
                                      owner.memory().packed().end()};
  const auto refused = [&](std::span<const std::byte> one, std::span<const std::byte> other) {
    const auto made = decode.transport().connect(one, other, failure);
    if (made) return false;
    return made.error().code == ErrorCode::data_loss ||
           made.error().code == ErrorCode::invalid_argument;
  };
  for (const auto* whole : {&address, &packed}) {
    const auto with = [&](std::span<const std::byte> changed) {
      return whole == &address ? refused(changed, packed) : refused(address, changed);
    };
    for (std::size_t size = 0; size < whole->size(); ++size)
      ASSERT_TRUE(with(std::span{*whole}.first(size)));
    for (std::size_t bit = 0; bit < 8 * whole->size(); ++bit) {
      auto changed = *whole;
      changed[bit / 8] ^= std::byte{1} << (bit % 8);
      ASSERT_TRUE(with(changed)) << "bit " << bit;
    }
    auto longer = *whole;
    longer.push_back(std::byte{0});
    ASSERT_TRUE(with(longer));
  }
  ASSERT_TRUE(refused(packed, address));
  EXPECT_EQ(failure.calls, 0);
}

TEST_P(TransportConformance,
       CloseEndsFetchesAsCancelledAndThenLetsGoOfTheMemory) {  // acceptance 30
  constexpr std::size_t kFetches = 8;
  TransportRank owner{GetParam(), kFetches * kMiB, 4};
  TransportRank decode{GetParam(), kFetches * kMiB};
  owner.serve();
  HeardFailure failure;
  // From nothing on the way to much on the way.
  for (const int turns : {0, 1, 2, 4, 16, 64}) {
    auto endpoint = open(decode, owner, failure);
    std::deque<HeardTransfer> heard(kFetches);
    for (std::size_t i = 0; i < kFetches; ++i)
      ASSERT_TRUE(endpoint->fetch(i * kMiB, decode.bytes().subspan(i * kMiB, kMiB), heard[i]));
    for (int i = 0; i < turns; ++i) {
      owner.transport().progress();
      decode.transport().progress();
    }
    const auto done_before =
        std::count_if(heard.begin(), heard.end(), [](auto& h) { return h.done(); });
    endpoint->close();
    endpoint->close();
    HeardTransfer late;
    EXPECT_FALSE(endpoint->fetch(0, decode.bytes().first(8), late));
    EXPECT_EQ(std::count_if(heard.begin(), heard.end(), [](auto& h) { return h.done(); }),
              done_before)
        << "a listener ran inside close()";
    ASSERT_TRUE(pump({&decode, &owner}, [&] { return endpoint->closed(); }));
    std::ptrdiff_t cancelled = 0;
    for (auto& one : heard) {
      EXPECT_EQ(one.calls, 1);
      if (!one.last) {
        EXPECT_EQ(one.last.error().code, ErrorCode::cancelled) << one.last.error().message;
        ++cancelled;
      }
    }
    EXPECT_EQ(cancelled, static_cast<std::ptrdiff_t>(kFetches) - done_before);
    endpoint.reset();
    // Nobody writes any more, however long both sides go on.
    std::fill(decode.bytes().begin(), decode.bytes().end(), std::byte{0x11});
    for (int i = 0; i < 2000; ++i) {
      owner.transport().progress();
      decode.transport().progress();
    }
    EXPECT_TRUE(std::all_of(decode.bytes().begin(), decode.bytes().end(),
                            [](auto b) { return b == std::byte{0x11}; }));
  }
  EXPECT_EQ(failure.calls, 0);
}

TEST_P(TransportConformance,
       OwnerThatGoesFailsItsFetchesAndNoOthers) {  // acceptance 33, in one process
  constexpr std::size_t kFetches = 8;
  TransportRank survivor{GetParam(), kMiB, 2};
  survivor.serve();
  TransportRank decode{GetParam(), kFetches * kMiB};
  HeardFailure survivor_failure;
  const auto to_survivor = open(decode, survivor, survivor_failure);
  for (const int turns : {0, 2, 8, 32}) {
    std::optional<TransportRank> owner{std::in_place, GetParam(), kFetches * kMiB, 3U};
    owner->serve();
    HeardFailure failure;
    auto endpoint = open(decode, *owner, failure);
    std::deque<HeardTransfer> heard(kFetches);
    for (std::size_t i = 0; i < kFetches; ++i)
      ASSERT_TRUE(endpoint->fetch(i * kMiB, decode.bytes().subspan(i * kMiB, kMiB), heard[i]));
    for (int i = 0; i < turns; ++i) {
      owner->transport().progress();
      decode.transport().progress();
    }
    owner.reset();
    ASSERT_TRUE(pump({&decode, &survivor},
                     [&] { return endpoint->in_flight() == 0 && failure.calls > 0; }));
    EXPECT_EQ(failure.last.code, ErrorCode::unavailable) << failure.last.message;
    for (auto& one : heard) {
      EXPECT_EQ(one.calls, 1);
      if (!one.last) {
        EXPECT_EQ(one.last.error().code, ErrorCode::unavailable) << one.last.error().message;
      }
    }
    HeardTransfer late;
    EXPECT_FALSE(endpoint->fetch(0, decode.bytes().first(8), late));
    close(decode, {&survivor}, *endpoint);
    EXPECT_EQ(failure.calls, 1);

    HeardTransfer other;
    ASSERT_TRUE(to_survivor->fetch(7, decode.bytes().first(1000), other));
    ASSERT_TRUE(pump({&decode, &survivor}, [&] { return other.done(); }));
    EXPECT_TRUE(other.last) << other.last.error().message;
    EXPECT_EQ(decode.bytes()[0], pattern(2, 7));
  }
  EXPECT_EQ(survivor_failure.calls, 0);
  close(decode, {&survivor}, *to_survivor);
}

TEST_P(TransportConformance, ListenersMayFetchCloseAndDestroy) {
  TransportRank owner{GetParam(), 4096, 5};
  TransportRank decode{GetParam(), 4096};
  owner.serve();
  HeardFailure failure;
  auto endpoint = open(decode, owner, failure);
  HeardTransfer heard;
  std::uint64_t next = 0;
  heard.then = [&] {
    if (++next == 200) return endpoint->close();
    ASSERT_TRUE(endpoint->fetch(next, decode.bytes().first(64), heard));
  };
  ASSERT_TRUE(endpoint->fetch(next, decode.bytes().first(64), heard));
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return endpoint->closed(); }));
  EXPECT_EQ(heard.calls, 200);
  EXPECT_EQ(decode.bytes()[0], pattern(5, 199));

  // Two endpoints to an owner that goes: the first one's failure takes the other down too.
  HeardFailure first_failure;
  HeardFailure second_failure;
  std::optional<TransportRank> doomed{std::in_place, GetParam(), 4096U, 6U};
  doomed->serve();
  auto first = open(decode, *doomed, first_failure);
  auto second = open(decode, *doomed, second_failure);
  const auto destroy_both = [&] {
    first.reset();
    second.reset();
  };
  first_failure.then = destroy_both;
  second_failure.then = destroy_both;
  doomed.reset();
  ASSERT_TRUE(pump({&decode, &owner}, [&] { return first == nullptr; }));
  for (int i = 0; i < 100; ++i) decode.transport().progress();
  EXPECT_EQ(first_failure.calls + second_failure.calls, 1);
}

TEST_P(TransportConformance, BothSidesMaySleepUntilWoken) {
  TransportRank owner{GetParam(), 4 * kMiB, 7};
  owner.serve();
  TransportRank decode{GetParam(), 4 * kMiB};
  std::atomic<bool> stop{false};
  std::jthread owner_thread{[&] {
    // Short waits only bound the end of the test: the decode side never polls unasked.
    while (!stop.load(std::memory_order_relaxed))
      if (owner.transport().progress() == 0) (void)wait_for_activity(owner.transport(), 20ms);
  }};
  HeardFailure failure;
  auto endpoint = decode.connect(owner, failure);
  const auto sleep_until = [&](const std::function<bool()>& done) {
    while (!done()) {
      if (decode.transport().progress() > 0) continue;
      if (done()) break;
      ASSERT_TRUE(wait_for_activity(decode.transport())) << "slept through";
    }
  };
  HeardTransfer probed;
  ASSERT_TRUE(endpoint->probe(decode.bytes(), probed));
  sleep_until([&] { return probed.done(); });
  ASSERT_TRUE(probed.last) << probed.last.error().message;
  for (int round = 0; round < 50; ++round) {
    HeardTransfer heard;
    const std::size_t size = round % 2 == 0 ? 4096 : 4 * kMiB - 100;
    const auto offset = static_cast<std::uint64_t>(round);
    ASSERT_TRUE(endpoint->fetch(offset, decode.bytes().first(size), heard));
    sleep_until([&] { return heard.done(); });
    ASSERT_TRUE(heard.last) << heard.last.error().message;
    ASSERT_EQ(decode.bytes()[size - 1], pattern(7, offset + size - 1));
  }
  endpoint->close();
  sleep_until([&] { return endpoint->closed(); });
  stop = true;
}

TEST_P(TransportConformance, OwnerThatGoesWakesASleeper) {
  std::optional<TransportRank> owner{std::in_place, GetParam(), 4096U, 7U};
  owner->serve();
  TransportRank decode{GetParam(), 4096};
  HeardFailure failure;
  auto endpoint = open(decode, *owner, failure);
  while (decode.transport().progress() + owner->transport().progress() > 0) {
  }
  std::jthread end{[&] { owner.reset(); }};
  while (failure.calls == 0) {
    if (decode.transport().progress() > 0) continue;
    ASSERT_TRUE(wait_for_activity(decode.transport())) << "slept through";
  }
  EXPECT_EQ(failure.last.code, ErrorCode::unavailable);
  endpoint->close();
  EXPECT_TRUE(pump({&decode}, [&] { return endpoint->closed(); }));
}

TEST_P(TransportConformance, ReconnectsLeaveNothingBehind) {  // acceptance 35, the transport's part
  TransportRank owner{GetParam(), 4096, 8};
  TransportRank decode{GetParam(), 4096};
  owner.serve();
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator{"/proc/self/fd"},
                         std::filesystem::directory_iterator{});
  };
  std::ptrdiff_t before = 0;
  for (int round = 0; round < 60; ++round) {
    HeardFailure failure;
    {
      // Every third one is given up before it has connected.
      const auto hasty = decode.connect(owner, failure);
      if (round % 3 == 0)
        close(decode, {&owner}, *hasty);
      else
        hasty->close();
      ASSERT_TRUE(pump({&decode, &owner}, [&] { return hasty->closed(); }));
    }
    const auto endpoint = open(decode, owner, failure);
    HeardTransfer heard;
    ASSERT_TRUE(endpoint->fetch(1, decode.bytes().first(100), heard));
    ASSERT_TRUE(pump({&decode, &owner}, [&] { return heard.done(); }));
    ASSERT_TRUE(heard.last) << heard.last.error().message;
    close(decode, {&owner}, *endpoint);
    EXPECT_EQ(failure.calls, 0);
    for (int i = 0; i < 200; ++i) {
      decode.transport().progress();
      owner.transport().progress();
    }
    if (round == 19) before = open_files();
  }
  EXPECT_LE(open_files(), before + 4) << "file descriptors are left behind";
}

TEST_P(TransportConformance, ServesOnlyMemoryOfItsOwn) {
  TransportRank owner{GetParam(), 64};
  TransportRank other{GetParam(), 64};
  const auto status = other.transport().serve(owner.memory());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
}

}  // namespace kvshard::testing
