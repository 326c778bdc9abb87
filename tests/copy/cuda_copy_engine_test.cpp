#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "copy/gpu_test.hpp"
#include "support/copy_engine_conformance.hpp"

namespace kvshard::test {
namespace {

class CudaTestBed final : public CopyTestBed {
 public:
  explicit CudaTestBed(const CopyEngineOptions& options)
      : engine_{make_copy_engine(options).value()} {}
  CopyEngine& engine() override { return *engine_; }
  std::byte* allocate(std::size_t bytes) override {
    memory_.push_back(make_device_buffer(bytes).value());
    return static_cast<std::byte*>(memory_.back().get());
  }
  void write(std::byte* to, std::span<const std::byte> from) override {
    EXPECT_CUDA(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice));
    // From pageable memory that returns before the last bytes have landed, and engines do not wait for it.
    EXPECT_CUDA(cudaDeviceSynchronize());
  }
  void read(std::span<std::byte> to, const std::byte* from) override {
    EXPECT_CUDA(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost));
  }

 private:
  std::vector<DeviceBuffer> memory_;
  std::unique_ptr<CopyEngine> engine_;
};

template <std::uint32_t kMaxSms, bool kHighPriority>
std::unique_ptr<CopyTestBed> make_bed() {
  return std::make_unique<CudaTestBed>(CopyEngineOptions{.memory = MemoryKind::cuda,
                                                         .host_threads = 1,
                                                         .cuda_device = 0,
                                                         .cuda_max_sms = kMaxSms,
                                                         .cuda_high_priority = kHighPriority});
}

// Under compute-sanitizer the big cases take minutes; scripts/gpu_tests.sh makes them small.
std::size_t big_bytes() {
  const char* const set = std::getenv("KVSHARD_TEST_BIG_BYTES");
  return set != nullptr ? std::strtoull(set, nullptr, 10) : std::size_t{24} << 20;
}

// The cap chooses other kernels: bulk copies where the device has them.
INSTANTIATE_TEST_SUITE_P(
    Cuda, CopyEngineConformance,
    testing::Values(CopyEngineUnderTest{"whole_gpu", make_bed<0, false>, no_device, big_bytes()},
                    CopyEngineUnderTest{"two_multiprocessors", make_bed<2, true>, no_device,
                                        big_bytes()}),
    [](const auto& instance) { return instance.param.name; });

class CudaCopyEngineTest : public GpuTest {
 protected:
  void SetUpOnGpu() override {
    bed_ = make_bed<0, false>();
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_ = CudaStream{stream};
    ASSERT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_ = CudaEvent{event};
  }

  CopyEngine& engine() { return bed_->engine(); }

  void drain() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    while (engine().in_flight() != 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      if (engine().progress() != 0 || !engine().arm()) continue;
      pollfd wait{.fd = engine().wake_fd(), .events = POLLIN, .revents = 0};
      (void)poll(&wait, 1, 1000);
    }
  }

  // Holds the stream until open(): a kernel that is still running, as far as the stream can tell.
  struct Gate {
    std::atomic<bool> is_open{false};
    void open() {
      is_open.store(true);
      is_open.notify_all();
    }
    static void hold(void* gate) { static_cast<Gate*>(gate)->is_open.wait(false); }
  };

  std::unique_ptr<CopyTestBed> bed_;
  CudaStream stream_;
  CudaEvent event_;
};

constexpr std::uint64_t kPageBytes = 4096;

// acceptance 23: the publish event fires late, and the bytes are written just before it.
TEST_F(CudaCopyEngineTest, GathersTheFinalBytesOfALatePublishEvent) {
  std::byte* const pool = bed_->allocate(4 * kPageBytes);
  std::byte* const slot = bed_->allocate(slot_bytes_for(2 * kPageBytes));
  ASSERT_CUDA(cudaMemset(pool, 0x11, 4 * kPageBytes));
  ASSERT_CUDA(cudaMemset(slot, 0xcc, slot_bytes_for(2 * kPageBytes)));
  ASSERT_CUDA(cudaDeviceSynchronize());
  Gate gate;
  ASSERT_CUDA(cudaLaunchHostFunc(stream_.get(), Gate::hold, &gate));
  ASSERT_CUDA(cudaMemsetAsync(pool, 0x22, 4 * kPageBytes, stream_.get()));
  ASSERT_CUDA(cudaEventRecord(event_.get(), stream_.get()));

  const JobPlan plan{
      {{.buffers = {0}, .offsets = {3 * kPageBytes, 0}, .shape = {.row_bytes = kPageBytes}}}, pool};
  CountingListener listener;
  CopyJob job;
  job.batches = plan.batches();
  job.slot = slot;
  job.stamp.payload_bytes = plan.bytes();
  job.after = event_.get();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  EXPECT_EQ(engine().progress(), 0u);  // returns: it never waits for a device
  EXPECT_EQ(engine().progress(), 0u);
  EXPECT_EQ(engine().in_flight(), 1u);
  EXPECT_EQ(listener.calls, 0);

  EXPECT_TRUE(engine().arm());
  EXPECT_TRUE(engine().arm());
  pollfd bell{.fd = engine().wake_fd(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&bell, 1, 0), 0);
  gate.open();
  EXPECT_EQ(poll(&bell, 1, 60'000), 1);  // who sleeps is woken
  drain();
  EXPECT_EQ(listener.calls, 1);
  EXPECT_TRUE(listener.ok);
  std::vector<std::byte> found(plan.bytes());
  bed_->read(found, slot + kSlotHeaderBytes);
  EXPECT_EQ(found, std::vector<std::byte>(plan.bytes(), std::byte{0x22}));
}

// acceptance 24: destination pages are still read by a kernel, so nothing is written before its event.
TEST_F(CudaCopyEngineTest, ScattersOnlyAfterTheEventOfTheLastReader) {
  std::byte* const pool = bed_->allocate(kPageBytes);
  std::byte* const seen = bed_->allocate(kPageBytes);
  std::byte* const slot = bed_->allocate(slot_bytes_for(kPageBytes));
  const JobPlan plan{{{.buffers = {0}, .offsets = {0}, .shape = {.row_bytes = kPageBytes}}}, pool};
  ASSERT_CUDA(cudaMemset(pool, 0x33, kPageBytes));
  ASSERT_CUDA(cudaDeviceSynchronize());
  CountingListener listener;
  CopyJob job;
  job.batches = plan.batches();
  job.slot = slot;
  job.stamp.payload_bytes = plan.bytes();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  drain();
  ASSERT_CUDA(cudaMemset(pool, 0x44, kPageBytes));
  ASSERT_CUDA(cudaDeviceSynchronize());

  Gate gate;
  ASSERT_CUDA(cudaLaunchHostFunc(stream_.get(), Gate::hold, &gate));
  ASSERT_CUDA(cudaMemcpyAsync(seen, pool, kPageBytes, cudaMemcpyDeviceToDevice,
                              stream_.get()));  // the reader
  ASSERT_CUDA(cudaEventRecord(event_.get(), stream_.get()));
  job.direction = CopyJob::Direction::scatter;
  job.after = event_.get();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  EXPECT_EQ(engine().progress(), 0u);
  gate.open();
  drain();
  EXPECT_EQ(listener.calls, 2);
  EXPECT_TRUE(listener.ok);
  std::vector<std::byte> found(kPageBytes);
  bed_->read(found, seen);
  EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{0x44}));
  bed_->read(found, pool);
  EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{0x33}));
}

// acceptance 24, without a slot between.
TEST_F(CudaCopyEngineTest, PullsOnlyAfterTheEventOfTheLastReader) {
  std::byte* const source = bed_->allocate(kPageBytes);
  std::byte* const pool = bed_->allocate(kPageBytes);
  std::byte* const seen = bed_->allocate(kPageBytes);
  ASSERT_CUDA(cudaMemset(source, 0x33, kPageBytes));
  ASSERT_CUDA(cudaMemset(pool, 0x44, kPageBytes));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const BatchPlan page{.buffers = {0}, .offsets = {0}, .shape = {.row_bytes = kPageBytes}};
  const JobPlan from{{page}, source};
  const JobPlan to{{page}, pool};

  Gate gate;
  ASSERT_CUDA(cudaLaunchHostFunc(stream_.get(), Gate::hold, &gate));
  ASSERT_CUDA(cudaMemcpyAsync(seen, pool, kPageBytes, cudaMemcpyDeviceToDevice, stream_.get()));
  ASSERT_CUDA(cudaEventRecord(event_.get(), stream_.get()));
  CountingListener listener;
  CopyJob job;
  job.direction = CopyJob::Direction::pull;
  job.sources = from.batches();
  job.batches = to.batches();
  job.stamp.payload_bytes = kPageBytes;
  job.after = event_.get();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  EXPECT_EQ(engine().progress(), 0u);
  EXPECT_EQ(engine().progress(), 0u);
  EXPECT_EQ(listener.calls, 0);
  gate.open();
  drain();
  EXPECT_EQ(listener.calls, 1);
  EXPECT_TRUE(listener.ok) << listener.message;
  std::vector<std::byte> found(kPageBytes);
  bed_->read(found, seen);
  EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{0x44}));
  bed_->read(found, pool);
  EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{0x33}));
}

// Launches overlap, but one of another direction may read what went before: it runs behind all of it.
TEST_F(CudaCopyEngineTest, AnotherDirectionRunsBehindWhatWentBefore) {
  std::byte* const pool = bed_->allocate(2 * kPageBytes);
  std::byte* const first = bed_->allocate(slot_bytes_for(kPageBytes));
  std::byte* const second = bed_->allocate(slot_bytes_for(kPageBytes));
  std::byte* const aside = bed_->allocate(kPageBytes);
  ASSERT_CUDA(cudaMemset(pool, 0x11, 2 * kPageBytes));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const JobPlan from{{{.buffers = {0}, .offsets = {0}, .shape = {.row_bytes = kPageBytes}}}, pool};
  const JobPlan to{{{.buffers = {0}, .offsets = {kPageBytes}, .shape = {.row_bytes = kPageBytes}}},
                   pool};
  Gate gate;
  ASSERT_CUDA(cudaLaunchHostFunc(stream_.get(), Gate::hold, &gate));
  ASSERT_CUDA(cudaMemsetAsync(pool, 0x22, kPageBytes, stream_.get()));
  ASSERT_CUDA(cudaEventRecord(event_.get(), stream_.get()));

  CountingListener listener;
  CopyJob job;
  job.batches = from.batches();
  job.slot = first;
  job.stamp.payload_bytes = kPageBytes;
  job.after = event_.get();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  job.after = nullptr;
  job.direction = CopyJob::Direction::scatter;
  job.batches = to.batches();
  ASSERT_TRUE(engine().submit(job, listener).ok());
  job.direction = CopyJob::Direction::gather;
  job.slot = second;
  ASSERT_TRUE(engine().submit(job, listener).ok());
  EXPECT_EQ(engine().progress(), 0u);

  cudaStream_t other = nullptr;  // what need not wait would be through when this is
  ASSERT_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const CudaStream owner{other};
  ASSERT_CUDA(cudaMemsetAsync(aside, 0, kPageBytes, other));
  ASSERT_CUDA(cudaStreamSynchronize(other));
  EXPECT_EQ(engine().progress(), 0u);
  gate.open();
  drain();
  EXPECT_EQ(listener.calls, 3);
  EXPECT_TRUE(listener.ok) << listener.message;
  std::vector<std::byte> found(kPageBytes);
  for (const std::byte* const at : {pool + kPageBytes, second + kSlotHeaderBytes}) {
    bed_->read(found, at);
    EXPECT_EQ(found, std::vector<std::byte>(kPageBytes, std::byte{0x22}));
  }
}

// acceptance 25: what is launched at completion sees the bytes. Each round has other bytes, so a stale one shows.
TEST_F(CudaCopyEngineTest, WorkLaunchedAtCompletionSeesEveryByte) {
  constexpr int kRounds = 10'000;
  std::byte* const source = bed_->allocate(kPageBytes);
  std::byte* const pool = bed_->allocate(2 * kPageBytes);
  std::byte* const slot = bed_->allocate(slot_bytes_for(kPageBytes));
  PinnedBuffer consumed = make_pinned_buffer(kRounds * sizeof(std::uint32_t)).value();
  const JobPlan from{{{.buffers = {0}, .offsets = {0}, .shape = {.row_bytes = kPageBytes}}},
                     source};
  const JobPlan to{{{.buffers = {0}, .offsets = {kPageBytes}, .shape = {.row_bytes = kPageBytes}}},
                   pool};
  CountingListener listener;
  CopyJob gather;
  gather.batches = from.batches();
  gather.slot = slot;
  gather.stamp.payload_bytes = kPageBytes;
  gather.after = event_.get();
  CopyJob scatter = gather;
  scatter.direction = CopyJob::Direction::scatter;
  scatter.batches = to.batches();
  scatter.after = nullptr;
  const int rounds = std::getenv("KVSHARD_TEST_BIG_BYTES") != nullptr ? 50 : kRounds;
  for (int round = 0; round < rounds; ++round) {
    const auto last_word = static_cast<std::size_t>(round) % (kPageBytes / 4);
    ASSERT_CUDA(cudaMemsetAsync(source, round % 251, kPageBytes, stream_.get()));
    ASSERT_CUDA(cudaEventRecord(event_.get(), stream_.get()));
    gather.stamp.generation = scatter.stamp.generation = static_cast<std::uint64_t>(round);
    ASSERT_TRUE(engine().submit(gather, listener).ok());
    ASSERT_TRUE(engine().submit(scatter, listener).ok());
    drain();
    ASSERT_TRUE(listener.ok) << listener.message;
    ASSERT_CUDA(cudaMemcpyAsync(static_cast<std::uint32_t*>(consumed.get()) + round,
                                pool + kPageBytes + last_word * 4, 4, cudaMemcpyDeviceToHost,
                                stream_.get()));
  }
  ASSERT_CUDA(cudaStreamSynchronize(stream_.get()));
  for (int round = 0; round < rounds; ++round)
    ASSERT_EQ(static_cast<std::uint32_t*>(consumed.get())[round],
              static_cast<std::uint32_t>(round % 251) * 0x01010101U)
        << "round " << round;
}

// More pages than the descriptor ring first holds, and more launches than it holds at once.
TEST_F(CudaCopyEngineTest, CopiesMorePagesThanItsRingHolds) {
  constexpr std::uint64_t kRowBytes = 16;
  constexpr std::uint64_t kPages = 100'000;
  constexpr int kJobs = 60;
  std::byte* const pool = bed_->allocate(kPages * kRowBytes);
  std::vector<std::byte> bytes(kPages * kRowBytes);
  std::mt19937_64 random{3};
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  bed_->write(pool, bytes);
  std::vector<std::uint64_t> offsets(kPages);
  for (std::uint64_t i = 0; i < kPages; ++i) offsets[i] = (kPages - 1 - i) * kRowBytes;
  std::byte* const buffers[] = {pool};
  CountingListener listener;
  std::vector<std::byte*> slots;
  for (int i = 0; i < kJobs; ++i) {
    const std::uint64_t pages = i % 3 == 0 ? kPages : 1000;
    const FragmentBatch batch{buffers, std::span{offsets}.first(pages), {.row_bytes = kRowBytes}};
    slots.push_back(bed_->allocate(slot_bytes_for(batch.bytes())));
    CopyJob job;
    job.batches = {&batch, 1};
    job.slot = slots.back();
    job.stamp.payload_bytes = batch.bytes();
    ASSERT_TRUE(engine().submit(job, listener).ok());
    if (i % 7 == 0) engine().progress();
  }
  drain();
  EXPECT_EQ(listener.calls, kJobs);
  EXPECT_TRUE(listener.ok) << listener.message;
  for (int i = 0; i < kJobs; ++i) {
    const std::uint64_t pages = i % 3 == 0 ? kPages : 1000;
    std::vector<std::byte> found(pages * kRowBytes);
    bed_->read(found, slots[static_cast<std::size_t>(i)] + kSlotHeaderBytes);
    for (std::uint64_t page = 0; page < pages; ++page)
      ASSERT_TRUE(std::equal(found.begin() + static_cast<std::ptrdiff_t>(page * kRowBytes),
                             found.begin() + static_cast<std::ptrdiff_t>((page + 1) * kRowBytes),
                             bytes.begin() + static_cast<std::ptrdiff_t>(offsets[page])))
          << "job " << i << ", page " << page;
  }
}

TEST_F(CudaCopyEngineTest, RefusesADeviceThatIsNotThere) {
  const auto engine =
      make_copy_engine({.memory = MemoryKind::cuda, .host_threads = 1, .cuda_device = 4096});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.error().code, ErrorCode::unsupported);
  const auto staging = make_staging_memory(MemoryKind::cuda, 4096, 64);
  ASSERT_FALSE(staging.ok());
  EXPECT_EQ(staging.error().code, ErrorCode::unsupported);
}

TEST_F(CudaCopyEngineTest, StagingMemoryIsOfTheDeviceAndRefusedWhenTooLarge) {
  const auto staging = make_staging_memory(MemoryKind::cuda, 0, 1 << 20);
  ASSERT_TRUE(staging.ok());
  EXPECT_EQ((*staging)->kind(), MemoryKind::cuda);
  EXPECT_EQ((*staging)->bytes().size(), std::size_t{1} << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>((*staging)->bytes().data()) % 256, 0u);
  cudaPointerAttributes attributes{};
  ASSERT_CUDA(cudaPointerGetAttributes(&attributes, (*staging)->bytes().data()));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  const auto too_large = make_staging_memory(MemoryKind::cuda, 0, std::size_t{1} << 50);
  ASSERT_FALSE(too_large.ok());
  EXPECT_EQ(too_large.error().code, ErrorCode::resource_exhausted);
}

// acceptance 48: a build with CUDA on a machine without a GPU says why.
TEST(CudaCopyEngineWithoutDeviceTest, NamesTheReason) {
  if (!no_device()) GTEST_SKIP() << "there is a CUDA device";
  const auto engine = make_copy_engine({.memory = MemoryKind::cuda});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.error().code, ErrorCode::unsupported);
  EXPECT_NE(engine.error().message.find("no CUDA device"), std::string::npos);
}

}  // namespace
}  // namespace kvshard::test
