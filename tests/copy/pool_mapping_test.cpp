#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "copy/pool_blob.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/pool_mapping.hpp"
#include "support/copy_plans.hpp"
#include "support/counting_listener.hpp"

// Everything about mapped pools that needs no GPU: host memory in one process, and the bytes of an export.
namespace kvshard::test {
namespace {

/// Two groups: token-major pages with gaps between them, and packed head-major ones.
Geometry small_geometry() {
  Geometry geometry;
  geometry.model_id = "small";
  BufferGroup kv;
  kv.layers = 3;
  kv.heads = 2;
  kv.head_bytes = 8;
  kv.page_size = 4;
  kv.page_stride = 80;
  kv.page_count = 5;
  BufferGroup index;
  index.name = "index";
  index.layers = 2;
  index.buffers_per_layer = 1;
  index.order = PageOrder::head_major;
  index.heads = 1;
  index.head_bytes = 6;
  index.page_size = 4;
  index.page_count = 5;
  geometry.groups = {kv, index};
  return geometry;
}
constexpr std::uint64_t kKvBytes = 4 * 80 + 64;
constexpr std::uint64_t kIndexBytes = 5 * 24;

/// Its memory, on the heap.
struct HostPool {
  HostPool() {
    pool.geometry = small_geometry();
    for (const BufferGroup& group : pool.geometry.groups) {
      auto& buffers = pool.buffers.emplace_back();
      for (std::uint32_t i = 0; i < group.buffers(); ++i)
        buffers.push_back(memory.emplace_back(std::make_unique<std::byte[]>(kKvBytes)).get());
    }
  }
  Pool pool;
  std::vector<std::unique_ptr<std::byte[]>> memory;
};

PoolBlob cuda_blob() {
  PoolBlob blob;
  blob.memory = MemoryKind::cuda;
  blob.process = this_process().value();
  blob.process.nonce ^= 1;  // another process
  blob.export_id = 77;
  blob.device_uuid.fill(std::byte{0xd0});
  blob.allocations.resize(2);
  blob.allocations[0].bytes = 6 * kKvBytes;
  blob.allocations[1].bytes = 2 * kIndexBytes + 16;
  blob.allocations[1].handle.fill(std::byte{0xa1});
  for (std::uint64_t i = 0; i < 6; ++i) blob.buffers.push_back({0, i * kKvBytes});
  for (std::uint64_t i = 0; i < 2; ++i) blob.buffers.push_back({1, 16 + i * kIndexBytes});
  return blob;
}

void expect_error(const Status& status, ErrorCode code, const std::string& part) {
  ASSERT_FALSE(status.ok()) << part;
  EXPECT_EQ(to_string(status.error().code), to_string(code)) << status.error().message;
  EXPECT_NE(status.error().message.find(part), std::string::npos)
      << status.error().message << "\nlacks: " << part;
}
template <typename T>
void expect_error(const Result<T>& result, ErrorCode code, const std::string& part) {
  expect_error(result.ok() ? Status{} : Status{result.error()}, code, part);
}

auto map_host(std::span<const std::byte> bytes, const Geometry& geometry = small_geometry()) {
  return map_pool(bytes, geometry, MemoryKind::host, -1);
}

TEST(PoolMappingTest, APoolOfThisProcessIsUsedWhereItIs) {
  HostPool source;
  auto exported = export_pool(source.pool, MemoryKind::host, -1);
  ASSERT_TRUE(exported.ok()) << exported.error().message;
  EXPECT_LE((*exported)->bytes().size(), kMaxPoolExportBytes);
  const auto mapped = map_host((*exported)->bytes());
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  EXPECT_EQ((*mapped)->pool().buffers, source.pool.buffers);
  EXPECT_EQ((*mapped)->pool().geometry, source.pool.geometry);
  EXPECT_EQ((*mapped)->description(), "in place, a pool of this process");

  // And a pull through it: page 3 to page 1, in every buffer of the first group.
  for (std::byte* const buffer : source.pool.buffers[0])
    for (std::uint64_t i = 0; i < kKvBytes; ++i) buffer[i] = static_cast<std::byte>(i * 7 + 1);
  HostPool destination;
  const std::uint64_t from[] = {3 * 80};
  const std::uint64_t to[] = {80};
  const FragmentBatch sources{(*mapped)->pool().buffers[0], from, {.row_bytes = 64}};
  const FragmentBatch batches{destination.pool.buffers[0], to, {.row_bytes = 64}};
  auto engine = make_copy_engine({}).value();
  CountingListener listener;
  CopyJob job;
  job.direction = CopyJob::Direction::pull;
  job.sources = {&sources, 1};
  job.batches = {&batches, 1};
  job.stamp.payload_bytes = batches.bytes();
  ASSERT_TRUE(engine->submit(job, listener).ok());
  EXPECT_EQ(engine->progress(), 1u);
  EXPECT_TRUE(listener.ok);
  for (std::size_t i = 0; i < 6; ++i) {
    std::vector<std::byte> expected(kKvBytes);
    std::copy_n(source.pool.buffers[0][i] + 240, 64, expected.begin() + 80);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), destination.pool.buffers[0][i]));
  }
}

TEST(PoolMappingTest, RefusesAnExportThatIsGone) {
  HostPool source;
  auto exported = export_pool(source.pool, MemoryKind::host, -1).value();
  const auto other = export_pool(source.pool, MemoryKind::host, -1).value();
  const std::vector<std::byte> bytes(exported->bytes().begin(), exported->bytes().end());
  const auto kept = map_host(bytes);
  ASSERT_TRUE(kept.ok());
  exported.reset();
  expect_error(map_host(bytes), ErrorCode::failed_precondition, "is gone");
  EXPECT_EQ((*kept)->pool().buffers, source.pool.buffers);
  EXPECT_TRUE(map_host(other->bytes()).ok());
}

TEST(PoolMappingTest, RefusesAnotherGeometry) {
  HostPool source;
  const auto exported = export_pool(source.pool, MemoryKind::host, -1).value();
  Geometry geometry = small_geometry();
  geometry.groups[0].page_count += 1;
  expect_error(map_host(exported->bytes(), geometry), ErrorCode::failed_precondition,
               "another geometry");
  geometry.groups[0].head_bytes = 0;
  expect_error(map_host(exported->bytes(), geometry), ErrorCode::invalid_argument, "head_bytes");
}

TEST(PoolMappingTest, RefusesToExportAPoolThatIsNone) {
  HostPool source;
  source.pool.buffers[1][0] = nullptr;
  const auto exported = export_pool(source.pool, MemoryKind::host, -1);
  ASSERT_FALSE(exported.ok());
  EXPECT_EQ(exported.error().code, ErrorCode::invalid_argument);
}

// A child that was forked has a copy of everything, and yet is another process.
TEST(PoolMappingTest, HostMemoryOfAnotherProcessIsUnsupported) {
  HostPool source;
  const auto exported = export_pool(source.pool, MemoryKind::host, -1).value();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto mapped = map_host(exported->bytes());
    std::string said = mapped.ok() ? "mapped" : std::string{to_string(mapped.error().code)};
    if (!mapped.ok()) said += ": " + mapped.error().message;
    ::_exit(::write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0
                                                                                            : 1);
  }
  ::close(ends[1]);
  std::string said(500, '\0');
  const ssize_t bytes = ::read(ends[0], said.data(), said.size());
  ASSERT_GT(bytes, 0);
  said.resize(static_cast<std::size_t>(bytes));
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(said, "unsupported: the pool is in host memory of process " +
                      std::to_string(::getpid()) + ", which cannot be mapped here");
}

// acceptance 48: works, or is refused with the reason.
TEST(PoolMappingTest, NamesWhyAPoolCannotBeMapped) {
  const auto refusal = [](const PoolBlob& blob, MemoryKind memory, const std::string& part) {
    expect_error(map_pool(encode(blob).value(), small_geometry(), memory, 0),
                 ErrorCode::unsupported, part);
  };
  PoolBlob blob = cuda_blob();
  refusal(blob, MemoryKind::host, "the pool is in CUDA memory, ours in host memory");
  blob.process.boot_id[0] = blob.process.boot_id[0] == '0' ? '1' : '0';
  refusal(blob, MemoryKind::cuda, "another host, boot id");
  blob = cuda_blob();
  blob.process.ipc_namespace = 123;
  refusal(blob, MemoryKind::cuda, "another IPC namespace: 123, here ");
  blob = cuda_blob();
  blob.process.pid_namespace = 124;
  refusal(blob, MemoryKind::cuda, "another PID namespace: 124, here ");
  blob = cuda_blob();
  blob.memory = MemoryKind::host;
  blob.allocations.clear();
  blob.buffers.clear();
  refusal(blob, MemoryKind::cuda, "the pool is in host memory, ours in CUDA memory");
  refusal(blob, MemoryKind::host, "host memory of process");
}

TEST(PoolMappingTest, RefusesPagesBeyondTheirAllocation) {
  const Geometry geometry = small_geometry();
  EXPECT_TRUE(check_holds(cuda_blob(), geometry).ok());
  const auto refused = [&](const PoolBlob& blob, const Geometry& declared, const char* part) {
    expect_error(check_holds(blob, declared), ErrorCode::invalid_argument, part);
    // No driver is asked about it.
    expect_error(map_pool(encode(blob).value(), declared, MemoryKind::cuda, 0),
                 ErrorCode::invalid_argument, part);
  };
  PoolBlob blob = cuda_blob();
  blob.allocations[0].bytes -= 1;
  refused(blob, geometry, "5 of group kv takes 384 bytes, its allocation has 383 left");
  blob = cuda_blob();
  blob.buffers[7].offset += 1;
  refused(blob, geometry, "1 of group index takes 120 bytes, its allocation has 119 left");
  blob = cuda_blob();
  blob.buffers[0].allocation = 1;
  refused(blob, geometry, "0 of group kv takes 384 bytes");
  blob = cuda_blob();
  blob.buffers.pop_back();
  refused(blob, geometry, "7, but group index ends with number 8");
  blob = cuda_blob();
  blob.buffers.push_back({0, 0});
  refused(blob, geometry, "9, the geometry has 8");
  Geometry more = geometry;
  more.groups[1].page_count = 6;
  refused(cuda_blob(), more, "1 of group index takes 144 bytes, its allocation has 120 left");
  more = geometry;
  more.groups[0].token_stride = 1000;
  more.groups[0].page_stride = 0x1000'0000'0000;
  refused(cuda_blob(), more, "0 of group kv takes 70368744180680 bytes");
}

TEST(PoolBlobTest, HoldsHundredsOfBuffersAndSaysWhenItIsFull) {
  PoolBlob blob = cuda_blob();
  blob.allocations.resize(4, {.handle = {}, .bytes = std::uint64_t{1} << 40});
  blob.buffers.resize(1500);
  const auto full = encode(blob);
  ASSERT_TRUE(full.ok()) << full.error().message;
  EXPECT_LE(full->size(), kMaxPoolExportBytes);
  blob.buffers.resize(180);
  blob.allocations.resize(180, {.handle = {}, .bytes = 100});  // one for each buffer
  EXPECT_TRUE(encode(blob).ok());
  blob.buffers.resize(300);
  blob.allocations.resize(300);
  expect_error(encode(blob), ErrorCode::unsupported,
               "300 buffers in 300 allocations takes 24705 bytes, at most 16384");
}

// acceptance 42: whatever the bytes, an error or the export that they are.
TEST(PoolBlobPropertyTest, DecodesWhatItEncodesAndNothingElse) {
  const PoolBlob blob = cuda_blob();
  const std::vector<std::byte> good = encode(blob).value();
  const auto back = decode_pool_blob(good);
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(*back, blob);
  for (std::size_t size = 0; size < good.size(); ++size)
    expect_error(decode_pool_blob(std::span{good}.first(size)), ErrorCode::invalid_argument,
                 "pool export: ");
  std::vector<std::byte> longer = good;
  longer.resize(longer.size() + 1);
  expect_error(decode_pool_blob(longer), ErrorCode::invalid_argument, "are left");

  std::size_t accepted = 0;
  std::size_t refused = 0;
  const auto check = [&](const std::vector<std::byte>& bytes) {
    // A copy of the exact size, so that the address sanitizer sees a read past its end.
    const auto exact = std::make_unique<std::byte[]>(bytes.size());
    std::ranges::copy(bytes, exact.get());
    const auto decoded = decode_pool_blob({exact.get(), bytes.size()});
    if (!decoded.ok()) {
      ++refused;
      EXPECT_EQ(decoded.error().code, ErrorCode::invalid_argument);
      return;
    }
    ++accepted;
    EXPECT_EQ(encode(*decoded).value(), bytes);
    (void)check_holds(*decoded, small_geometry());
    for (const PoolBlob::Buffer& buffer : decoded->buffers) {
      ASSERT_LT(buffer.allocation, decoded->allocations.size());
      ASSERT_LT(buffer.offset, decoded->allocations[buffer.allocation].bytes);
    }
  };
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::vector<std::byte> bytes = good;
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
    check(bytes);
  }
  std::mt19937_64 random{1};
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> bytes = good;
    for (std::uint64_t edits = random_in(random, 1, 4); edits > 0; --edits)
      bytes[random_in(random, 0, bytes.size() - 1)] = static_cast<std::byte>(random());
    if (random_in(random, 0, 2) == 0) bytes.resize(random_in(random, 0, 2 * bytes.size()));
    check(bytes);
  }
  for (int round = 0; round < 2'000; ++round) {  // counts that say nothing about what follows
    std::vector<std::byte> bytes(good.begin(), good.begin() + 105);
    bytes.resize(random_in(random, 105, 1000));
    for (std::size_t i = 101; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random());
    check(bytes);
  }
  EXPECT_GT(accepted, 1000u);
  EXPECT_GT(refused, 1000u);
}

TEST(PoolBlobTest, NamesTheFieldThatIsWrong) {
  const std::vector<std::byte> good = encode(cuda_blob()).value();
  const auto refused = [&](std::size_t at, std::uint8_t value, const char* part) {
    std::vector<std::byte> bytes = good;
    bytes[at] = std::byte{value};
    expect_error(decode_pool_blob(bytes), ErrorCode::invalid_argument, part);
  };
  refused(0, 0, "magic: ");
  refused(8, 9, "memory: 9 is not a known kind");
  refused(8, 1, "2 with 8 buffers, in host memory");
  refused(9, '\n', "boot id: holds byte 10");
  refused(101, 3, "8 buffers in 3 allocations take 296 bytes, 224 are left");
  refused(105 + 2 * 72, 2, "buffer: in allocation 2 of 2");
  refused(105 + 2 * 72 + 2 + 7, 1, "buffer: at 72057594037927936 of an allocation of 2304 bytes");
  expect_error(decode_pool_blob(std::vector<std::byte>(kMaxPoolExportBytes + 1)),
               ErrorCode::invalid_argument, "16385 bytes, expected 105 to 16384");
}

TEST(PoolBlobTest, ThisProcessIsTheSameEachTime) {
  EXPECT_EQ(this_process().value(), this_process().value());
}

}  // namespace
}  // namespace kvshard::test
