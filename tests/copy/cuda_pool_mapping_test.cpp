#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"
#include "copy/cuda/cuda_handles.hpp"
#include "copy/gpu_test.hpp"
#include "copy/pool_blob.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/pool_mapping.hpp"
#include "support/counting_listener.hpp"

// Pools of device memory mapped from another process. The other process is this program again, started with
// --export-pool: it fills a pool, exports it, and waits until it is told to end, or is killed.
namespace kvshard::test {
namespace {

constexpr std::uint32_t kPages = 9;
constexpr std::uint64_t kKvPage = 16 * 2 * 128;
constexpr std::uint64_t kKvStride = kKvPage + 256;
constexpr std::uint64_t kIndexPage = 16 * 132;
// From buffer to buffer in an allocation: more than a buffer takes.
constexpr std::uint64_t kBufferBytes = kPages * kKvStride + 512;
constexpr std::uint32_t kBuffersPerAllocation = 40;

Geometry test_geometry() {
  Geometry geometry;
  geometry.model_id = "mapped";
  BufferGroup kv;
  kv.layers = 40;
  kv.heads = 2;
  kv.head_bytes = 128;
  kv.page_size = 16;
  kv.page_stride = kKvStride;
  kv.page_count = kPages;
  BufferGroup index;
  index.name = "index";
  index.layers = 5;
  index.buffers_per_layer = 1;
  index.heads = 1;
  index.head_bytes = 132;
  index.page_size = 16;
  index.page_count = kPages;
  geometry.groups = {kv, index};
  return geometry;
}

/// A pool of that geometry in a few allocations, its buffers at odd places in them.
struct DevicePool {
  explicit DevicePool(int device) {
    const DeviceGuard guard{device};
    pool.geometry = test_geometry();
    for (const BufferGroup& group : pool.geometry.groups) {
      auto& buffers = pool.buffers.emplace_back();
      for (std::uint32_t i = 0; i < group.buffers(); ++i) {
        if (i % kBuffersPerAllocation == 0)
          memory.push_back(make_device_buffer(kBuffersPerAllocation * kBufferBytes + 256).value());
        buffers.push_back(static_cast<std::byte*>(memory.back().get()) + 64 +
                          (i % kBuffersPerAllocation) * kBufferBytes);
      }
    }
  }

  static std::byte byte_of(unsigned seed, std::size_t group, std::size_t buffer, std::size_t at) {
    return static_cast<std::byte>(seed * 31 + group * 17 + buffer * 7 + at * 13 + (at >> 8) * 5);
  }
  bool fill(unsigned seed) const {
    std::vector<std::byte> bytes(kBufferBytes);
    for (std::size_t group = 0; group < pool.buffers.size(); ++group)
      for (std::size_t buffer = 0; buffer < pool.buffers[group].size(); ++buffer) {
        for (std::size_t at = 0; at < bytes.size(); ++at)
          bytes[at] = byte_of(seed, group, buffer, at);
        if (cudaMemcpy(pool.buffers[group][buffer], bytes.data(), bytes.size(),
                       cudaMemcpyHostToDevice) != cudaSuccess)
          return false;
      }
    return cudaDeviceSynchronize() == cudaSuccess;
  }

  Pool pool;
  std::vector<DeviceBuffer> memory;
};

bool write_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  for (ssize_t n = 1; bytes > 0 && n > 0; at += n, bytes -= static_cast<std::size_t>(n))
    if (n = ::send(fd, at, bytes, MSG_NOSIGNAL); n < 0) n = 0;
  return bytes == 0;
}
bool read_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  for (ssize_t n = 1; bytes > 0 && n > 0; at += n, bytes -= static_cast<std::size_t>(n))
    if (n = ::recv(fd, at, bytes, 0); n < 0) n = 0;
  return bytes == 0;
}

}  // namespace

/// What the other process does. Each byte that it reads is a new seed to fill the pool with, and is answered
/// by the same.
int export_pool_and_wait(int fd, int device) {
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (no_device()) return 1;
  const DevicePool pool{device};
  const auto exported = export_pool(pool.pool, MemoryKind::cuda, device);
  if (!exported.ok()) {
    std::fprintf(stderr, "export: %s\n", exported.error().message.c_str());
    return 1;
  }
  const std::span<const std::byte> bytes = (*exported)->bytes();
  const auto size = static_cast<std::uint32_t>(bytes.size());
  if (!write_all(fd, &size, sizeof size) || !write_all(fd, bytes.data(), size)) return 1;
  for (unsigned char seed = 0; read_all(fd, &seed, 1);)
    if (!pool.fill(seed) || !write_all(fd, &seed, 1)) return 1;
  return 0;
}

namespace {

class ExportingProcess {
 public:
  explicit ExportingProcess(int device = 0) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const UniqueFd theirs{ends[1]};
    fd_ = UniqueFd{ends[0]};
    std::string program = "/proc/self/exe";
    std::string role = "--export-pool";
    std::string fd = std::to_string(theirs.get());
    std::string on = std::to_string(device);
    char* const arguments[] = {program.data(), role.data(), fd.data(), on.data(), nullptr};
    posix_spawn_file_actions_t actions;
    EXPECT_EQ(::posix_spawn_file_actions_init(&actions), 0);
    EXPECT_EQ(::posix_spawn_file_actions_addclose(&actions, ends[0]), 0);
    EXPECT_EQ(::posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ), 0);
    EXPECT_EQ(::posix_spawn_file_actions_destroy(&actions), 0);
  }
  ~ExportingProcess() { end(SIGKILL); }
  ExportingProcess(const ExportingProcess&) = delete;
  ExportingProcess& operator=(const ExportingProcess&) = delete;

  // What it exports, once that is filled.
  std::vector<std::byte> exported(unsigned char seed) {
    std::uint32_t size = 0;
    EXPECT_TRUE(read_all(fd_.get(), &size, sizeof size)) << "the exporting process gave up";
    std::vector<std::byte> bytes(std::min<std::size_t>(size, kMaxPoolExportBytes));
    EXPECT_TRUE(read_all(fd_.get(), bytes.data(), bytes.size()));
    EXPECT_TRUE(fill(seed));
    return bytes;
  }
  bool fill(unsigned char seed) {
    unsigned char answer = 0;
    return write_all(fd_.get(), &seed, 1) && read_all(fd_.get(), &answer, 1) && answer == seed;
  }
  void end(int signal) {
    if (pid_ <= 0) return;
    (void)::kill(pid_, signal);
    EXPECT_EQ(::waitpid(pid_, nullptr, 0), pid_);
    pid_ = -1;
  }

 private:
  UniqueFd fd_;
  pid_t pid_{-1};
};

class CudaPoolMappingTest : public GpuTest {
 protected:
  void SetUpOnGpu() override { use_engine(0); }
  void use_engine(std::uint32_t max_sms) {
    engine_ = make_copy_engine({.memory = MemoryKind::cuda, .cuda_max_sms = max_sms}).value();
  }

  static auto map(std::span<const std::byte> bytes, const Geometry& geometry = test_geometry()) {
    return map_pool(bytes, geometry, MemoryKind::cuda, 0);
  }

  /// Submits the pull of every page of `from` but the last to another page of `to`.
  void submit_pull(const Pool& from, const DevicePool& to, CopyListener& listener) {
    std::vector<std::vector<std::uint64_t>> offsets(4);
    std::vector<FragmentBatch> sources;
    std::vector<FragmentBatch> batches;
    for (std::size_t group = 0; group < 2; ++group) {
      const std::uint64_t page = group == 0 ? kKvPage : kIndexPage;
      const std::uint64_t stride = group == 0 ? kKvStride : kIndexPage;
      for (std::uint32_t i = 0; i + 1 < kPages; ++i) {
        offsets[group * 2].push_back(i * stride);
        offsets[group * 2 + 1].push_back(target(i) * stride);
      }
      sources.push_back({from.buffers[group], offsets[group * 2], {.row_bytes = page}});
      batches.push_back({to.pool.buffers[group], offsets[group * 2 + 1], {.row_bytes = page}});
    }
    CopyJob job;
    job.direction = CopyJob::Direction::pull;
    job.sources = sources;
    job.batches = batches;
    for (const FragmentBatch& batch : batches) job.stamp.payload_bytes += batch.bytes();
    const Status taken = engine_->submit(job, listener);
    ASSERT_TRUE(taken.ok()) << taken.error().message;
  }
  static std::uint32_t target(std::uint32_t page) { return kPages - 1 - page; }

  void drain() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    while (engine_->in_flight() != 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      if (engine_->progress() != 0 || !engine_->arm()) continue;
      pollfd wait{.fd = engine_->wake_fd(), .events = POLLIN, .revents = 0};
      (void)poll(&wait, 1, 1000);
    }
  }

  /// Pulls into a pool full of canaries, and compares every byte of it.
  void expect_pull(const Pool& from, unsigned char seed) {
    constexpr unsigned kCanary = 99;
    const DevicePool to{0};
    ASSERT_TRUE(to.fill(kCanary));
    CountingListener listener;
    submit_pull(from, to, listener);
    drain();
    ASSERT_EQ(listener.calls, 1);
    ASSERT_TRUE(listener.ok) << listener.message;
    expect_contents(to, seed, kCanary);
  }
  static void expect_contents(const DevicePool& to, unsigned char seed, unsigned canary) {
    for (std::size_t group = 0; group < 2; ++group) {
      const std::uint64_t page = group == 0 ? kKvPage : kIndexPage;
      const std::uint64_t stride = group == 0 ? kKvStride : kIndexPage;
      for (std::size_t buffer = 0; buffer < to.pool.buffers[group].size(); ++buffer) {
        std::vector<std::byte> expected(kBufferBytes);
        for (std::size_t at = 0; at < expected.size(); ++at)
          expected[at] = DevicePool::byte_of(canary, group, buffer, at);
        for (std::uint32_t i = 0; i + 1 < kPages; ++i)
          for (std::uint64_t at = 0; at < page; ++at)
            expected[target(i) * stride + at] =
                DevicePool::byte_of(seed, group, buffer, i * stride + at);
        std::vector<std::byte> found(kBufferBytes);
        ASSERT_CUDA(cudaMemcpy(found.data(), to.pool.buffers[group][buffer], found.size(),
                               cudaMemcpyDeviceToHost));
        ASSERT_TRUE(found == expected) << "group " << group << ", buffer " << buffer;
      }
    }
  }

  std::unique_ptr<CopyEngine> engine_;
};

TEST_F(CudaPoolMappingTest, APoolOfThisProcessIsUsedWhereItIs) {
  const DevicePool source{0};
  ASSERT_TRUE(source.fill(5));
  const auto exported = export_pool(source.pool, MemoryKind::cuda, 0);
  ASSERT_TRUE(exported.ok()) << exported.error().message;
  const auto mapped = map((*exported)->bytes());
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  EXPECT_EQ((*mapped)->pool().buffers, source.pool.buffers);
  expect_pull((*mapped)->pool(), 5);
}

TEST_F(CudaPoolMappingTest, ExportsEachAllocationOnce) {
  const DevicePool source{0};
  const auto exported = export_pool(source.pool, MemoryKind::cuda, 0);
  ASSERT_TRUE(exported.ok()) << exported.error().message;
  const auto blob = decode_pool_blob((*exported)->bytes());
  ASSERT_TRUE(blob.ok()) << blob.error().message;
  EXPECT_EQ(blob->allocations.size(), 3u);
  EXPECT_EQ(blob->buffers.size(), 85u);
  EXPECT_TRUE(check_holds(*blob, source.pool.geometry).ok());
  EXPECT_EQ(blob->buffers[41].offset, 64 + kBufferBytes);
}

TEST_F(CudaPoolMappingTest, PullsExactBytesFromAnotherProcess) {
  ExportingProcess exporter;
  const auto bytes = exporter.exported(7);
  ASSERT_FALSE(HasFailure());
  const auto mapped = map(bytes);
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  EXPECT_NE((*mapped)->description().find("CUDA IPC, 3 allocations"), std::string_view::npos);
  expect_pull((*mapped)->pool(), 7);
  ASSERT_TRUE(exporter.fill(8));  // what is written later is seen by kernels launched later
  expect_pull((*mapped)->pool(), 8);
  use_engine(2);
  expect_pull((*mapped)->pool(), 8);
}

TEST_F(CudaPoolMappingTest, PullsExactBytesFromAnotherProcessAndDevice) {
  int devices = 0;
  int can = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one CUDA device";
  ASSERT_CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  ExportingProcess exporter{1};
  const auto bytes = exporter.exported(21);
  ASSERT_FALSE(HasFailure());
  const auto mapped = map(bytes);
  if (can == 0) {
    ASSERT_FALSE(mapped.ok());
    EXPECT_EQ(mapped.error().code, ErrorCode::unsupported);
    EXPECT_NE(mapped.error().message.find("no peer access"), std::string::npos);
    return;
  }
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  expect_pull((*mapped)->pool(), 21);
}

TEST_F(CudaPoolMappingTest, TwoSessionsMapThePoolOfAnotherProcess) {
  ExportingProcess exporter;
  const auto bytes = exporter.exported(9);
  ASSERT_FALSE(HasFailure());
  auto first = map(bytes);
  auto second = map(bytes);
  ASSERT_TRUE(first.ok()) << first.error().message;
  ASSERT_TRUE(second.ok()) << second.error().message;
  expect_pull((*first)->pool(), 9);
  first.value().reset();
  expect_pull((*second)->pool(), 9);
  second.value().reset();
  const auto again = map(bytes);
  ASSERT_TRUE(again.ok()) << again.error().message;
  expect_pull((*again)->pool(), 9);
}

// acceptance 33: the prefill rank is killed; the memory of it that is mapped stays until it is unmapped.
TEST_F(CudaPoolMappingTest, OutlivesAnotherProcessThatIsKilled) {
  auto exporter = std::make_unique<ExportingProcess>();
  const auto bytes = exporter->exported(10);
  ASSERT_FALSE(HasFailure());
  auto mapped = map(bytes);
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  expect_pull((*mapped)->pool(), 10);

  // Killed while copies run.
  constexpr unsigned kCanary = 98;
  const DevicePool to{0};
  ASSERT_TRUE(to.fill(kCanary));
  CountingListener listener;
  constexpr int kJobs = 200;
  for (int i = 0; i < kJobs; ++i) submit_pull((*mapped)->pool(), to, listener);
  engine_->progress();
  exporter->end(SIGKILL);
  drain();
  EXPECT_EQ(listener.calls, kJobs);
  EXPECT_EQ(listener.failures, 0) << listener.message;
  expect_contents(to, 10, kCanary);

  expect_pull((*mapped)->pool(), 10);
  const auto late = map(bytes);
  EXPECT_TRUE(late.ok() || late.error().code == ErrorCode::unsupported) << late.error().message;
  mapped.value().reset();
  // The device is as it was: another process's pool can be mapped.
  ExportingProcess other;
  const auto other_bytes = other.exported(11);
  const auto other_mapped = map(other_bytes);
  ASSERT_TRUE(other_mapped.ok()) << other_mapped.error().message;
  expect_pull((*other_mapped)->pool(), 11);
}

// acceptance 44: an authenticated peer that lies about its pool.
TEST_F(CudaPoolMappingTest, RefusesAllocationsThatAnotherProcessDoesNotHave) {
  ExportingProcess exporter;
  const auto bytes = exporter.exported(12);
  ASSERT_FALSE(HasFailure());
  PoolBlob blob = decode_pool_blob(bytes).value();
  Geometry geometry = test_geometry();
  geometry.groups[0].page_count += 1'000'000;
  geometry.groups[1].page_count += 1'000'000;
  for (PoolBlob::Allocation& allocation : blob.allocations)
    allocation.bytes = std::uint64_t{1} << 40;
  const auto larger = map(encode(blob).value(), geometry);
  ASSERT_FALSE(larger.ok());
  EXPECT_EQ(larger.error().code, ErrorCode::invalid_argument);
  EXPECT_NE(larger.error().message.find("allocation 0 has 1099511627776 bytes, "),
            std::string::npos)
      << larger.error().message;

  blob = decode_pool_blob(bytes).value();
  for (PoolBlob::Allocation& allocation : blob.allocations) allocation.handle.fill(std::byte{0x5a});
  const auto garbage = map(encode(blob).value());
  ASSERT_FALSE(garbage.ok());
  EXPECT_EQ(garbage.error().code, ErrorCode::unsupported) << garbage.error().message;

  const auto honest = map(bytes);
  ASSERT_TRUE(honest.ok()) << honest.error().message;
  expect_pull((*honest)->pool(), 12);
}

/// A pool of one buffer.
Pool pool_of(std::byte* buffer) {
  Pool pool;
  pool.geometry = test_geometry();
  pool.geometry.groups.resize(1);
  pool.geometry.groups[0].layers = 1;
  pool.geometry.groups[0].buffers_per_layer = 1;
  pool.buffers = {{buffer}};
  return pool;
}

void expect_unsupported(const Pool& pool, const std::string& part) {
  const auto exported = export_pool(pool, MemoryKind::cuda, 0);
  ASSERT_FALSE(exported.ok()) << part;
  EXPECT_EQ(exported.error().code, ErrorCode::unsupported);
  EXPECT_NE(exported.error().message.find(part), std::string::npos) << exported.error().message;
}

TEST_F(CudaPoolMappingTest, SaysWhyMemoryCannotBeExported) {
  void* async = nullptr;
  ASSERT_CUDA(cudaMallocAsync(&async, kBufferBytes, nullptr));
  ASSERT_CUDA(cudaStreamSynchronize(nullptr));
  expect_unsupported(pool_of(static_cast<std::byte*>(async)), "not exportable by CUDA IPC");
  ASSERT_CUDA(cudaFreeAsync(async, nullptr));
  ASSERT_CUDA(cudaStreamSynchronize(nullptr));

  const PinnedBuffer pinned = make_pinned_buffer(kBufferBytes).value();
  expect_unsupported(pool_of(static_cast<std::byte*>(pinned.get())),
                     "pool buffer 0 is in pinned host memory");
  std::vector<std::byte> pageable(kBufferBytes);
  expect_unsupported(pool_of(pageable.data()), "pool buffer 0 is in pageable host memory");
  void* managed = nullptr;
  ASSERT_CUDA(cudaMallocManaged(&managed, kBufferBytes));
  const DeviceBuffer owned{managed};
  expect_unsupported(pool_of(static_cast<std::byte*>(managed)), "in managed memory");
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);  // none of ours is left for the engine to find
}

TEST_F(CudaPoolMappingTest, SaysWhenThereAreTooManyAllocations) {
  Pool pool;
  pool.geometry = test_geometry();
  pool.geometry.groups.resize(1);
  pool.geometry.groups[0].layers = 125;
  std::vector<DeviceBuffer> memory;
  pool.buffers.emplace_back();
  for (int i = 0; i < 250; ++i) {
    memory.push_back(make_device_buffer(kBufferBytes).value());
    pool.buffers[0].push_back(static_cast<std::byte*>(memory.back().get()));
  }
  expect_unsupported(pool, "250 buffers in 250 allocations takes 20605 bytes, at most 16384");
}

TEST_F(CudaPoolMappingTest, RefusesADeviceThatIsNotThere) {
  const DevicePool source{0};
  const auto exported = export_pool(source.pool, MemoryKind::cuda, 4096);
  ASSERT_FALSE(exported.ok());
  EXPECT_EQ(exported.error().code, ErrorCode::unsupported);
  const auto good = export_pool(source.pool, MemoryKind::cuda, 0).value();
  const auto mapped = map_pool(good->bytes(), source.pool.geometry, MemoryKind::cuda, 4096);
  ASSERT_FALSE(mapped.ok());
  EXPECT_EQ(mapped.error().code, ErrorCode::unsupported);
}

// acceptance 48
TEST(CudaPoolMappingWithoutDeviceTest, NamesTheReason) {
  if (!no_device()) GTEST_SKIP() << "there is a CUDA device";
  std::vector<std::byte> memory(kBufferBytes);
  expect_unsupported(pool_of(memory.data()), "no CUDA device");
}

}  // namespace
}  // namespace kvshard::test

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--export-pool") == 0)
    return kvshard::test::export_pool_and_wait(std::atoi(argv[2]), std::atoi(argv[3]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
