#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "support/copy_engine_conformance.hpp"

namespace kvshard::test {
namespace {

class HostTestBed final : public CopyTestBed {
 public:
  explicit HostTestBed(std::uint32_t threads)
      : engine_{make_copy_engine({.memory = MemoryKind::host, .host_threads = threads}).value()} {}
  CopyEngine& engine() override { return *engine_; }
  std::byte* allocate(std::size_t bytes) override {
    void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    if (memory == nullptr) throw std::bad_alloc{};
    return memory_.emplace_back(static_cast<std::byte*>(memory)).get();
  }
  void write(std::byte* to, std::span<const std::byte> from) override {
    std::memcpy(to, from.data(), from.size());
  }
  void read(std::span<std::byte> to, const std::byte* from) override {
    std::memcpy(to.data(), from, to.size());
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::unique_ptr<CopyEngine> engine_;
};

std::optional<std::string> never_missing() {
  return std::nullopt;
}

INSTANTIATE_TEST_SUITE_P(
    Host, CopyEngineConformance,
    testing::Values(
        CopyEngineUnderTest{
            "one_thread",
            [] { return std::unique_ptr<CopyTestBed>{std::make_unique<HostTestBed>(1)}; },
            never_missing},
        CopyEngineUnderTest{
            "three_threads",
            [] { return std::unique_ptr<CopyTestBed>{std::make_unique<HostTestBed>(3)}; },
            never_missing}),
    [](const auto& instance) { return instance.param.name; });

TEST(HostCopyEngineTest, RefusesToWaitForACudaEvent) {
  HostTestBed bed{1};
  std::byte* const slot = bed.allocate(slot_bytes_for(0));
  CountingListener listener;
  const CopyJob job{.direction = CopyJob::Direction::gather,
                    .batches = {},
                    .slot = slot,
                    .stamp = {},
                    .checksum = false,
                    .after = reinterpret_cast<EventHandle>(slot)};
  const Status status = bed.engine().submit(job, listener);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::unsupported);
  EXPECT_EQ(bed.engine().in_flight(), 0u);
}

TEST(HostCopyEngineTest, TheDataLossMessageHoldsBothNumbers) {
  HostTestBed bed{1};
  CopyJob job;
  job.slot = bed.allocate(slot_bytes_for(0));
  job.stamp.generation = 41;
  CountingListener listener;
  ASSERT_TRUE(bed.engine().submit(job, listener).ok());
  job.direction = CopyJob::Direction::scatter;
  job.stamp.generation = 42;
  ASSERT_TRUE(bed.engine().submit(job, listener).ok());
  while (bed.engine().in_flight() != 0) bed.engine().progress();
  EXPECT_EQ(listener.message, "slot header holds generation 41, expected 42");
}

TEST(HostCopyEngineTest, LeavesBigJobsForALaterCall) {
  HostTestBed bed{1};
  constexpr std::uint64_t kBytes = 5 << 20;
  std::byte* const pool = bed.allocate(kBytes);
  std::memset(pool, 1, kBytes);
  const JobPlan plan{{{.buffers = {0}, .offsets = {0}, .shape = {.row_bytes = kBytes}}}, pool};
  CountingListener listener;
  CopyJob job;
  job.batches = plan.batches();
  job.slot = bed.allocate(slot_bytes_for(kBytes));
  job.stamp.payload_bytes = kBytes;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(bed.engine().submit(job, listener).ok());
  EXPECT_EQ(bed.engine().progress(), 1u);
  EXPECT_EQ(bed.engine().in_flight(), 2u);
  EXPECT_EQ(bed.engine().progress(), 1u);
  EXPECT_EQ(bed.engine().progress(), 1u);
  EXPECT_EQ(listener.calls, 3);
}

TEST(HostStagingMemoryTest, IsPageAlignedAndWritable) {
  const auto staging = make_staging_memory(MemoryKind::host, 0, 10'000);
  ASSERT_TRUE(staging.ok());
  const std::span<std::byte> bytes = (*staging)->bytes();
  EXPECT_EQ((*staging)->kind(), MemoryKind::host);
  EXPECT_EQ(bytes.size(), 10'000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % 4096, 0u);
  std::memset(bytes.data(), 0x5a, bytes.size());
  EXPECT_EQ(bytes.back(), std::byte{0x5a});
}

TEST(HostStagingMemoryTest, RefusesNoBytesAndMoreThanThereIs) {
  const auto none = make_staging_memory(MemoryKind::host, 0, 0);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, ErrorCode::invalid_argument);
  const auto too_much = make_staging_memory(MemoryKind::host, 0, std::size_t{1} << 60);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.error().code, ErrorCode::resource_exhausted);
}

}  // namespace
}  // namespace kvshard::test
