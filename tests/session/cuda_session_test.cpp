// Whole requests from prefill ranks to a decode rank with all pages in GPU memory, over each path by which the
// bytes can travel. The prefill ranks are processes of their own (cuda_prefill.hpp).

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "copy/gpu_test.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/plan.hpp"
#include "session/cuda_prefill.hpp"
#include "session/cuda_reshard_cases.hpp"
#include "support/cluster.hpp"

namespace kvshard::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kDecodePages = 1100;
constexpr auto kDelay = 50ms;  // of kernels that are late

std::string name_of(Via via) {
  return via == Via::mapped ? "Mapped" : via == Via::get ? "Get" : "Am";
}

TransferPath path_of(Via via) {
  return via == Via::mapped ? TransferPath::mapped
         : via == Via::get  ? TransferPath::get
                            : TransferPath::am;
}

std::string text_of(const Status& status) {
  return status ? "ok" : status.error().message;
}

CudaStream make_stream() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return CudaStream{stream};
}

CudaEvent make_event() {
  cudaEvent_t event = nullptr;
  must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return CudaEvent{event};
}

/// A count in device memory.
class DeviceCount {
 public:
  DeviceCount() : memory_{make_device_buffer(sizeof(std::uint64_t)).value()} {
    must(cudaMemset(memory_.get(), 0, sizeof(std::uint64_t)));
    must(cudaDeviceSynchronize());
  }
  [[nodiscard]] std::uint64_t* get() const { return static_cast<std::uint64_t*>(memory_.get()); }
  /// After all that was enqueued.
  [[nodiscard]] std::uint64_t value() const {
    std::uint64_t count = 0;
    must(cudaDeviceSynchronize());
    must(cudaMemcpy(&count, memory_.get(), sizeof count, cudaMemcpyDeviceToHost));
    return count;
  }

 private:
  DeviceBuffer memory_;
};

Result<std::unique_ptr<DecodeRank>> make_decode(const Pool& pool, Via via) {
  DecodeOptions options;
  options.pool = pool;
  options.landing_payload_bytes = 4096;
  options.mapped = via == Via::mapped      ? Mapped::always
                   : via == Via::automatic ? Mapped::automatic
                                           : Mapped::never;
  auto transport = make_cuda_transport(via);
  if (!transport) return transport.error();
  auto engine = make_copy_engine({.memory = MemoryKind::cuda});
  if (!engine) return engine.error();
  return DecodeRank::create(std::move(options), std::move(transport).value(),
                            std::move(engine).value());
}

/// The prefill ranks of one group, with the allocator that their engines would have.
struct PrefillGroup {
  explicit PrefillGroup(CudaPrefillSetup setup)
      : layout{PageLayout::create(setup.ranks, small_geometry(0).groups[0].page_size).value()},
        allocator{PageAllocator::create(layout, setup.page_count - 1).value()} {
    spec = {.name = "kvshard", .epoch = setup.epoch, .members = {}};
    for (setup.rank = 0; setup.rank < setup.ranks; ++setup.rank)
      ranks.push_back(std::make_unique<CudaPrefill>(setup));
    for (auto& rank : ranks) {
      const auto member = rank->member();
      EXPECT_TRUE(member.ok()) << (member ? "" : member.error().message);
      spec.members.push_back(member.value_or(GroupMember{}));
    }
  }

  std::vector<LogicalPage> chain(std::uint32_t pages) {
    std::vector<LogicalPage> chain(pages);
    const auto drawn = allocator.draw_chain(chain);
    EXPECT_TRUE(drawn.ok()) << (drawn ? "" : drawn.error().message);
    return chain;
  }
  void open(RoomId room) {
    for (auto& rank : ranks) {
      const Status status = rank->open(room);
      EXPECT_TRUE(status.ok()) << text_of(status);
    }
  }
  void publish(const CudaPrefill::Chunk& chunk) {
    for (auto& rank : ranks) {
      const auto published = rank->publish(chunk);
      EXPECT_TRUE(published.ok()) << (published ? "" : published.error().message);
    }
  }
  void expect_end(bool ok = true) {
    for (auto& rank : ranks) {
      const Status end = rank->room_end();
      EXPECT_EQ(end.ok(), ok) << text_of(end);
    }
  }

  PageLayout layout;
  PageAllocator allocator;
  std::vector<std::unique_ptr<CudaPrefill>> ranks;
  GroupSpec spec;
};

/// A decode rank with its pages and their image on the host.
struct Decode {
  explicit Decode(Via via) : image{small_geometry(kDecodePages)}, device{image.geometry()} {
    auto made = make_decode(device.pool(), via);
    EXPECT_TRUE(made.ok()) << (made ? "" : made.error().message);
    rank = std::move(made).value();
  }

  GroupId connect(const PrefillGroup& group) const {
    const auto connected = rank->connect(group.spec, 20s);
    EXPECT_TRUE(connected.ok()) << (connected ? "" : connected.error().message);
    return connected.value_or(GroupId{});
  }
  /// Scattered pages.
  static std::vector<LocalPage> pages(std::uint32_t count, std::uint32_t from = 0) {
    std::vector<LocalPage> pages;  // 271 and the 1099 usable pages have no common factor
    for (std::uint32_t i = from; i < from + count; ++i)
      pages.push_back(LocalPage{1 + i * 271U % (kDecodePages - 1)});
    return pages;
  }
  /// Position i of `content` is in to[i] from `first` on, and nothing is anywhere else.
  void expect_holds(const std::vector<LocalPage>& to, const Content& content,
                    std::uint32_t first = 0) {
    device.download(image.pool());
    std::vector<bool> written(kDecodePages);
    for (std::uint32_t i = first; i < to.size(); ++i) {
      ASSERT_TRUE(image.holds(to[i], i, content));
      written[index(to[i])] = true;
    }
    for (std::uint32_t page = 0; page < kDecodePages; ++page) {
      if (written[page]) continue;
      ASSERT_TRUE(image.untouched(LocalPage{page}));
    }
  }
  void expect_pull_ok(const PullId pull) const {
    const auto event = Cluster::next_event(*rank);
    ASSERT_TRUE(event.ok()) << event.error().message;
    EXPECT_TRUE(event->status.ok()) << text_of(event->status);
    EXPECT_EQ(event->pull, pull);
  }
  void expect_idle() const {
    const DecodeStats stats = rank->stats();
    EXPECT_EQ(stats.pulls, 0U);
    EXPECT_EQ(stats.landing_in_use, 0U);
    EXPECT_EQ(stats.quarantined, 0U);
  }

  PatternedPool image;
  CudaPool device;
  std::unique_ptr<DecodeRank> rank;
};

/// One group and a decode rank; the decode rank goes first.
struct CudaCluster {
  explicit CudaCluster(Via via, std::uint32_t ranks = 2, std::uint32_t page_count = 65)
      : prefills{{.via = via, .ranks = ranks, .page_count = page_count}},
        decode{via},
        group{decode.connect(prefills)} {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const auto path = decode.rank->path(group, rank);
      EXPECT_TRUE(path.ok() && path->path == path_of(via)) << (path ? path->reason : "");  // 48
    }
  }

  /// A whole request in one chunk, of which decode lacks the pages from `first` on; compares every byte.
  void run_request(RoomId room, std::uint32_t pages, std::uint32_t first = 0) {
    run_request(prefills, group, room, pages, first);
  }
  void run_request(PrefillGroup& from, GroupId id, RoomId room, std::uint32_t pages,
                   std::uint32_t first = 0) {
    const auto source = from.chain(pages);
    const auto to = Decode::pages(pages);
    const Content content{.request = index(room), .generation = 1};
    decode.device.wipe();
    from.open(room);
    from.publish({.room = room, .pages = source, .content = content});
    const auto pull = decode.rank->pull({.group = id,
                                         .room = room,
                                         .pages = std::span{to}.subspan(first),
                                         .first_position = first});
    ASSERT_TRUE(pull.ok()) << pull.error().message;
    decode.expect_pull_ok(*pull);
    decode.expect_holds(to, content, first);
    from.expect_end();
    EXPECT_TRUE(from.allocator.free_chain(source).ok());
  }
  void expect_idle() {
    decode.expect_idle();
    for (auto& rank : prefills.ranks) {
      const PrefillStats stats = rank->stats();
      EXPECT_EQ(stats.rooms + stats.leases + stats.slots_in_use + stats.pulls_waiting, 0U);
    }
  }

  PrefillGroup prefills;
  Decode decode;
  GroupId group;
};

class CudaSessionTest : public GpuTest, public ::testing::WithParamInterface<Via> {
 protected:
  void SetUpOnGpu() override {
    must(cudaSetDevice(0));
    if (const auto transport = make_cuda_transport(GetParam()); !transport)
      GTEST_SKIP() << transport.error().message;  // a build without UCX
  }
};

INSTANTIATE_TEST_SUITE_P(Over, CudaSessionTest, ::testing::Values(Via::mapped, Via::get, Via::am),
                         [](const auto& param) { return name_of(param.param); });

// acceptance 1
TEST_P(CudaSessionTest, PullsEveryLengthFromEveryShardSize) {
  for (const std::uint32_t n : {1U, 2U, 4U}) {
    CudaCluster cluster{GetParam(), n, 1000 / n + 3};
    std::uint64_t room = 1;
    for (const std::uint32_t k : {0U, 1U, n - 1, n, n + 1, 1000U}) {
      SCOPED_TRACE("N=" + std::to_string(n) + " K=" + std::to_string(k));
      cluster.run_request(RoomId{room++}, k);
      if (HasFailure()) return;
    }
    cluster.expect_idle();
  }
}

// acceptance 2; 3, since run_request() checks that no page beyond the prompt is written
TEST_P(CudaSessionTest, FollowsARotatedChain) {
  CudaCluster cluster{GetParam(), 4};
  // Three single pages leave rank 3 with most free pages: the next chain has base 3.
  for (int i = 0; i < 3; ++i) (void)cluster.prefills.chain(1);
  const auto one = cluster.prefills.chain(1);
  EXPECT_EQ(cluster.prefills.layout.owner(one[0]), 3U);
  EXPECT_TRUE(cluster.prefills.allocator.free_chain(one).ok());
  cluster.run_request(RoomId{7}, 10);
  cluster.expect_idle();
}

// acceptance 4 and 5
TEST_P(CudaSessionTest, MovesOnlyWhatDecodeLacks) {
  CudaCluster cluster{GetParam()};
  constexpr std::uint32_t kPages = 7;
  for (std::uint32_t held = 0; held <= kPages; ++held) {
    SCOPED_TRACE(held);
    cluster.run_request(RoomId{100 + held}, kPages, held);
    if (HasFailure()) return;
  }
  cluster.expect_idle();
}

// acceptance 23: the pages hold old bytes when they are published, and are written later.
TEST_P(CudaSessionTest, SeesTheFinalBytesOfALatePublishEvent) {
  CudaCluster cluster{GetParam()};
  constexpr std::uint32_t kPages = 9;
  const auto source = cluster.prefills.chain(kPages);
  const auto to = Decode::pages(kPages);
  const Content before{.request = 5, .generation = 1};
  const Content content{.request = 5, .generation = 2};
  cluster.prefills.open(RoomId{5});
  for (auto& rank : cluster.prefills.ranks)
    ASSERT_TRUE(rank->fill({.pages = source, .content = before}).ok());
  const auto pull =
      cluster.decode.rank->pull({.group = cluster.group, .room = RoomId{5}, .pages = to});
  ASSERT_TRUE(pull.ok()) << pull.error().message;
  for (auto& rank : cluster.prefills.ranks) {
    const auto late =
        rank->publish({.room = RoomId{5}, .pages = source, .content = content, .delay = kDelay});
    ASSERT_TRUE(late.ok()) << late.error().message;
    EXPECT_TRUE(*late);
  }
  cluster.decode.expect_pull_ok(*pull);
  cluster.decode.expect_holds(to, content);
  cluster.prefills.expect_end();
  cluster.expect_idle();
}

// acceptance 24
TEST_P(CudaSessionTest, WritesNoPageThatAKernelStillReads) {
  CudaCluster cluster{GetParam()};
  constexpr std::uint32_t kPages = 9;
  cluster.run_request(RoomId{1}, kPages);
  const auto source = cluster.prefills.chain(kPages);
  const auto to = Decode::pages(kPages);
  const Content content{.request = 2, .generation = 1};
  cluster.prefills.open(RoomId{2});
  cluster.prefills.publish({.room = RoomId{2}, .pages = source, .content = content});

  const DevicePages old = cluster.decode.device.select(to, 0, 1, {.request = 1, .generation = 1});
  const DeviceCount wrong;
  const CudaStream reader = make_stream();
  const CudaEvent read = make_event();
  must(launch_delay(kDelay, reader.get()));
  must(launch_check(old, wrong.get(), reader.get()));
  must(cudaEventRecord(read.get(), reader.get()));
  const auto pull = cluster.decode.rank->pull(
      {.group = cluster.group, .room = RoomId{2}, .pages = to, .after = read.get()});
  ASSERT_TRUE(pull.ok()) << pull.error().message;
  EXPECT_EQ(cudaEventQuery(read.get()), cudaErrorNotReady);
  cluster.decode.expect_pull_ok(*pull);
  EXPECT_EQ(cudaEventQuery(read.get()), cudaSuccess);
  EXPECT_EQ(wrong.value(), 0U);
  cluster.decode.expect_holds(to, content);
  must(launch_check(old, wrong.get(), reader.get()));
  EXPECT_GT(wrong.value(), 0U);  // the reader would have told
  cluster.prefills.expect_end();
  cluster.expect_idle();
}

enum class Completion { poll, epoll, listener, stream };

/// A kernel that reads the pages when a pull has completed; each round the next content.
class Consumer final : public PullListener {
 public:
  Consumer(Decode& decode, std::span<const LocalPage> pages)
      : decode_{decode}, pages_{pages}, stream_{make_stream()} {
    for (CudaEvent& event : read_) event = make_event();
  }

  [[nodiscard]] StreamHandle stream() const { return stream_.get(); }
  /// The event after which the pages may be written again.
  [[nodiscard]] EventHandle read(std::uint64_t round) const { return read_[round % 2].get(); }
  [[nodiscard]] std::uint64_t wrong() const { return wrong_.value(); }

  void launch(std::uint64_t round) {
    const Content content{.request = 1, .generation = round};
    must(launch_check(decode_.device.select(pages_, 0, 1, content), wrong_.get(), stream_.get()));
    must(cudaEventRecord(read(round), stream_.get()));
  }
  void pull_done(const PullEvent& event) noexcept override {
    const std::uint64_t round = index(event.room);
    if (event.status) launch(round);
    {
      const std::lock_guard lock{mutex_};
      heard_ = round;
      status_ = event.status;
    }
    changed_.notify_one();
  }
  Status wait_for(std::uint64_t round) {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, 20s, [&] { return heard_ == round; }))
      return Error{ErrorCode::deadline_exceeded, "no pull ended"};
    return status_;
  }

 private:
  Decode& decode_;
  std::span<const LocalPage> pages_;
  CudaStream stream_;
  CudaEvent read_[2];  // in turn: a pull may still wait for the one before
  DeviceCount wrong_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t heard_{0};
  Status status_{};
};

Status wait_by_epoll(DecodeRank& rank, int epoll) {
  epoll_event ready{};
  PullEvent event;
  if (::epoll_wait(epoll, &ready, 1, 20'000) != 1)
    return Error{ErrorCode::deadline_exceeded, "no event within 20 s"};
  if (rank.poll({&event, 1}) != 1) return Error{ErrorCode::internal, "readable, but no event"};
  return event.status;
}

Status wait_by_poll(DecodeRank& rank) {
  PullEvent event;
  for (const auto end = std::chrono::steady_clock::now() + 20s; rank.poll({&event, 1}) == 0;) {
    if (std::chrono::steady_clock::now() > end)
      return Error{ErrorCode::deadline_exceeded, "no event within 20 s"};
    std::this_thread::yield();
  }
  return event.status;
}

// acceptance 25: 10^4 rounds on each path. The same pages every time, so that a stale byte is the last round's.
void consume_at_completion(Via via, Completion completion) {
  constexpr std::uint64_t kRounds = 2500;
  constexpr std::uint32_t kPages = 3;
  CudaCluster cluster{via, 1};
  DecodeRank& rank = *cluster.decode.rank;
  const auto source = cluster.prefills.chain(kPages);
  const auto to = Decode::pages(kPages);
  Consumer consumer{cluster.decode, to};
  const UniqueFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  epoll_event interest{.events = EPOLLIN, .data = {}};
  ASSERT_EQ(::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, rank.event_fd(), &interest), 0);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    const RoomId room{round};
    cluster.prefills.open(room);
    cluster.prefills.publish(
        {.room = room, .pages = source, .content = {.request = 1, .generation = round}});
    const auto pull =
        rank.pull({.group = cluster.group,
                   .room = room,
                   .pages = to,
                   .after = round > 1 ? consumer.read(round - 1) : nullptr,
                   .stream = completion == Completion::stream ? consumer.stream() : nullptr,
                   .listener = completion == Completion::listener ? &consumer : nullptr});
    ASSERT_TRUE(pull.ok()) << pull.error().message;
    Status status;
    switch (completion) {
      case Completion::poll:
        status = wait_by_poll(rank);
        break;
      case Completion::epoll:
        status = wait_by_epoll(rank, epoll.get());
        break;
      case Completion::listener:
        status = consumer.wait_for(round);
        break;
      case Completion::stream: {
        consumer.launch(round);
        must(cudaEventSynchronize(consumer.read(round)));
        PullEvent event;
        ASSERT_EQ(rank.poll({&event, 1}), 1U) << "the stream went on before the event was there";
        status = event.status;
        break;
      }
    }
    ASSERT_TRUE(status.ok()) << "round " << round << ": " << text_of(status);
    if (completion == Completion::poll || completion == Completion::epoll) consumer.launch(round);
    cluster.prefills.expect_end();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(consumer.wrong(), 0U);
  consumer.launch(kRounds + 1);
  EXPECT_EQ(consumer.wrong(), kPages * cluster.decode.image.buffers() * 128U / 8);  // it would tell
  cluster.expect_idle();
}

TEST_P(CudaSessionTest, AKernelSeesEveryByteWhenPollSaysSo) {
  consume_at_completion(GetParam(), Completion::poll);
}
TEST_P(CudaSessionTest, AKernelSeesEveryByteWhenEpollSaysSo) {
  consume_at_completion(GetParam(), Completion::epoll);
}
TEST_P(CudaSessionTest, AKernelSeesEveryByteWhenTheListenerHearsSo) {
  consume_at_completion(GetParam(), Completion::listener);
}
TEST_P(CudaSessionTest, AKernelSeesEveryByteBehindTheStreamThatWaits) {
  consume_at_completion(GetParam(), Completion::stream);
}

// acceptance 25: what waits for a pull that fails is not left waiting.
TEST_P(CudaSessionTest, AStreamGoesOnWhenItsPullFails) {
  CudaCluster cluster{GetParam()};
  const CudaStream stream = make_stream();
  const CudaEvent passed = make_event();
  const auto to = Decode::pages(4);
  cluster.prefills.open(RoomId{1});
  const auto pull = cluster.decode.rank->pull(
      {.group = cluster.group, .room = RoomId{1}, .pages = to, .stream = stream.get()});
  ASSERT_TRUE(pull.ok()) << pull.error().message;
  must(cudaEventRecord(passed.get(), stream.get()));
  for (auto& rank : cluster.prefills.ranks)
    while (rank->stats().leases == 0) std::this_thread::yield();
  EXPECT_EQ(cudaEventQuery(passed.get()), cudaErrorNotReady);
  ASSERT_TRUE(cluster.prefills.ranks[1]->abort(RoomId{1}).ok());
  must(cudaEventSynchronize(passed.get()));  // at the latest when the pull's deadline is over
  PullEvent event;
  ASSERT_EQ(cluster.decode.rank->poll({&event, 1}), 1U);
  ASSERT_FALSE(event.status.ok());
  EXPECT_EQ(event.status.error().code, ErrorCode::cancelled) << text_of(event.status);
  cluster.prefills.expect_end(false);
  cluster.run_request(RoomId{2}, 5);
  cluster.expect_idle();
}

std::size_t free_device_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  must(cudaMemGetInfo(&free, &total));
  return free;
}

// acceptance 33, 35
TEST_P(CudaSessionTest, APrefillRankThatIsKilledFailsItsPullsOnly) {
  CudaCluster cluster{GetParam(), 1};
  cluster.run_request(RoomId{1}, 5);
  const std::size_t free_before = free_device_memory();
  constexpr std::size_t kPoolBytes = std::size_t{256} << 20;
  constexpr std::uint32_t kPageCount = kPoolBytes / (6 * 128);
  CudaPrefillSetup setup{.via = GetParam(), .page_count = kPageCount, .epoch = 2};
  PrefillGroup killed{setup};
  const GroupId group = cluster.decode.connect(killed);
  cluster.run_request(killed, group, RoomId{1}, 5);

  const auto source = killed.chain(8);
  const auto to = Decode::pages(8);
  const std::uint64_t bytes = cluster.decode.rank->stats().bytes;
  killed.open(RoomId{2});
  killed.publish({.room = RoomId{2}, .pages = std::span{source}.first(4), .last = false});
  ASSERT_TRUE(cluster.decode.rank->pull({.group = group, .room = RoomId{2}, .pages = to}).ok());
  for (const auto end = std::chrono::steady_clock::now() + 20s;
       cluster.decode.rank->stats().bytes < bytes + 4U * 6 * 128;) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::yield();
  }
  killed.ranks[0]->kill();
  const auto event = Cluster::next_event(*cluster.decode.rank);
  ASSERT_TRUE(event.ok()) << event.error().message;
  ASSERT_FALSE(event->status.ok());
  EXPECT_EQ(event->status.error().code, ErrorCode::unavailable) << text_of(event->status);
  cluster.run_request(RoomId{2}, 5);  // the other group goes on

  // The driver keeps memory for as long as it is mapped, so what is back was unmapped.
  cluster.decode.rank->disconnect(group);
  for (const auto end = std::chrono::steady_clock::now() + 10s;
       free_device_memory() + kPoolBytes / 2 < free_before;) {
    ASSERT_LT(std::chrono::steady_clock::now(), end)
        << free_before << " bytes were free, now " << free_device_memory();
    std::this_thread::yield();
  }

  setup.epoch = 3;
  PrefillGroup again{setup};
  cluster.run_request(again, cluster.decode.connect(again), RoomId{1}, 5);
  cluster.expect_idle();
}

class CudaReshardTest : public GpuTest,
                        public ::testing::WithParamInterface<std::tuple<Via, std::size_t>> {};

INSTANTIATE_TEST_SUITE_P(Over, CudaReshardTest,
                         ::testing::Combine(::testing::Values(Via::mapped, Via::get, Via::am),
                                            ::testing::Range<std::size_t>(0,
                                                                          reshard_cases().size())),
                         [](const auto& param) {
                           return name_of(std::get<0>(param.param)) +
                                  reshard_cases()[std::get<1>(param.param)].name;
                         });

// The rows are in reshard_cases().
TEST_P(CudaReshardTest, EachByteArrivesOnce) {
  const auto [via, number] = GetParam();
  if (const auto transport = make_cuda_transport(via); !transport)
    GTEST_SKIP() << transport.error().message;
  const ReshardCase which = reshard_cases()[number];
  const auto pullers = count_pullers(which.prefill, which.decode);
  ASSERT_TRUE(pullers.ok()) << pullers.error().message;
  std::vector<std::unique_ptr<CudaPrefill>> prefills;
  CudaPrefillSetup setup{.via = via,
                         .reshard_case = static_cast<std::int32_t>(number),
                         .ranks = static_cast<std::uint32_t>(which.prefill.size())};
  for (setup.rank = 0; setup.rank < setup.ranks; ++setup.rank)
    prefills.push_back(std::make_unique<CudaPrefill>(setup));
  GroupSpec spec{.name = "kvshard", .epoch = 1, .members = {}};
  for (auto& prefill : prefills) {
    const auto member = prefill->member();
    ASSERT_TRUE(member.ok()) << member.error().message;
    spec.members.push_back(*member);
  }

  const ReshardPages request = ReshardPages::of_decode(which);
  const std::uint64_t end = std::min(request.tokens, ReshardPages::of_prefill(which).tokens);
  const auto first = static_cast<std::uint32_t>(which.held / request.span);
  constexpr RoomId kRoom{5};
  std::vector<std::unique_ptr<CudaPool>> pools;
  std::vector<std::unique_ptr<DecodeRank>> ranks;
  for (const Geometry& geometry : which.decode) {
    pools.push_back(std::make_unique<CudaPool>(geometry));
    auto made = make_decode(pools.back()->pool(), via);
    ASSERT_TRUE(made.ok()) << made.error().message;
    ranks.push_back(std::move(made).value());
    const auto group = ranks.back()->connect(spec, 20s);
    ASSERT_TRUE(group.ok()) << group.error().message;
    const auto pull =
        ranks.back()->pull({.group = *group,
                            .room = kRoom,
                            .pages = request.own(geometry.groups[0], first),
                            .first_position = first,
                            .skip_tokens = static_cast<std::uint32_t>(which.held % request.span),
                            .end_position = static_cast<std::uint32_t>(request.table.pages.size()),
                            .base = request.table.base});
    ASSERT_TRUE(pull.ok()) << pull.error().message;
  }
  for (std::size_t rank = 0; rank < prefills.size(); ++rank) {
    if ((*pullers)[rank] == 0) continue;
    const Status published = prefills[rank]->publish_request(kRoom, (*pullers)[rank]);
    ASSERT_TRUE(published.ok()) << text_of(published);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    SCOPED_TRACE("decode rank " + std::to_string(rank));
    const auto event = Cluster::next_event(*ranks[rank]);
    ASSERT_TRUE(event.ok()) << event.error().message;
    ASSERT_TRUE(event->status.ok()) << text_of(event->status);
    EXPECT_EQ(event->path, path_of(via));
    ModelPool image{which.decode[rank]};
    pools[rank]->download(image.pool());
    EXPECT_TRUE(image.holds(kReshardRequest, {request.table}, {which.held}, {end}));
    const BufferGroup& group = which.decode[rank].groups[0];
    std::uint64_t tokens = 0;  // the rank's own of those that were missing
    for (std::uint64_t token = which.held; token < end; ++token)
      tokens += token / group.stripe() % group.parts == group.phase(request.table.base) ? 1 : 0;
    EXPECT_EQ(event->bytes, tokens * group.buffers() * group.heads * group.head_bytes);
  }
  for (std::size_t rank = 0; rank < prefills.size(); ++rank) {
    if ((*pullers)[rank] == 0) continue;
    const Status ended = prefills[rank]->room_end();
    EXPECT_TRUE(ended.ok()) << text_of(ended);
  }
}

class CudaPathTest : public GpuTest {};

// acceptance 48: memory of an async pool cannot be exported.
TEST_F(CudaPathTest, MappedAlwaysIsRefusedWhereItCannotBe) {
  const PrefillGroup prefills{{.via = Via::mapped, .memory = CudaPool::Memory::async}};
  const Decode decode{Via::mapped};
  const auto group = decode.rank->connect(prefills.spec, 20s);
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::unsupported) << group.error().message;
  EXPECT_NE(group.error().message.find("mapped: the prefill rank does not export its pool"),
            std::string::npos)
      << group.error().message;
}

// acceptance 48
TEST_F(CudaPathTest, FallsBackToSlotsAndSaysWhy) {
  if (const auto transport = make_cuda_transport(Via::automatic); !transport)
    GTEST_SKIP() << transport.error().message;
  PrefillGroup prefills{{.via = Via::automatic, .memory = CudaPool::Memory::async}};
  Decode decode{Via::automatic};
  const GroupId group = decode.connect(prefills);
  const auto path = decode.rank->path(group, 0);
  ASSERT_TRUE(path.ok()) << path.error().message;
  EXPECT_TRUE(path->path == TransferPath::get || path->path == TransferPath::am)
      << to_string(path->path);
  EXPECT_NE(path->reason.find("not mapped: the prefill rank does not export its pool"),
            std::string::npos)
      << path->reason;
  const auto source = prefills.chain(5);
  const auto to = Decode::pages(5);
  const Content content{.request = 1, .generation = 1};
  prefills.open(RoomId{1});
  prefills.publish({.room = RoomId{1}, .pages = source, .content = content});
  const auto pull = decode.rank->pull({.group = group, .room = RoomId{1}, .pages = to});
  ASSERT_TRUE(pull.ok()) << pull.error().message;
  decode.expect_pull_ok(*pull);
  decode.expect_holds(to, content);
  prefills.expect_end();
}

// acceptance 48
TEST_F(CudaPathTest, MapsGpuMemoryUnasked) {
  if (const auto transport = make_cuda_transport(Via::automatic); !transport)
    GTEST_SKIP() << transport.error().message;
  const PrefillGroup prefills{{.via = Via::automatic}};
  const Decode decode{Via::automatic};
  const auto path = decode.rank->path(decode.connect(prefills), 0);
  ASSERT_TRUE(path.ok()) << path.error().message;
  EXPECT_EQ(path->path, TransferPath::mapped) << path->reason;
}

}  // namespace
}  // namespace kvshard::test

int main(int argc, char** argv) {
  // A kernel's code that is loaded at its first launch would wait for kernels that run, which may wait for it.
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  // ctest sets this for tests without a GPU, and TCP cannot move GPU memory.
  const char* const transports = std::getenv("UCX_TLS");
  if (transports != nullptr && std::strcmp(transports, "tcp") == 0) (void)::unsetenv("UCX_TLS");
  if (argc == 3 && std::strcmp(argv[1], kvshard::test::kPrefillFlag) == 0)
    return kvshard::test::run_cuda_prefill(std::atoi(argv[2]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
