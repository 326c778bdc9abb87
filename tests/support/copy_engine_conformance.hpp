#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "copy/allocation_count.hpp"
#include "kvshard/copy_engine.hpp"
#include "support/copy_plans.hpp"
#include "support/counting_listener.hpp"

// One suite that every copy engine passes. A test program links copy/allocation_count.cpp, makes a
// CopyTestBed for its kind of memory, and instantiates CopyEngineConformance with it.
//
// The oracle moves one byte at a time. Every comparison is of whole arenas, so each byte that no
// fragment covers is a canary.
namespace kvshard::test {

/// An engine, and memory that it can copy.
class CopyTestBed {
 public:
  virtual ~CopyTestBed() = default;
  virtual CopyEngine& engine() = 0;
  /// Aligned to 256 bytes at least; lives as long as the bed.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void write(std::byte* to, std::span<const std::byte> from) = 0;
  virtual void read(std::span<std::byte> to, const std::byte* from) = 0;
};

struct CopyEngineUnderTest {
  std::string name;
  std::unique_ptr<CopyTestBed> (*make)();
  /// Why this machine cannot run it; none when it can.
  std::optional<std::string> (*missing)();
  /// Bytes of the big cases: enough that the host engine shares them among threads.
  std::size_t big_bytes{std::size_t{3} << 20};
};

inline void PrintTo(const CopyEngineUnderTest& engine, std::ostream* out) {
  *out << engine.name;
}

/// Memory that the engine copies, and what should be in it.
class Arena {
 public:
  Arena(CopyTestBed& bed, std::size_t bytes, std::mt19937_64& random)
      : bed_{bed}, memory_{bed.allocate(bytes)}, expected_(bytes) {
    refill(random);
  }
  void refill(std::mt19937_64& random) {
    for (std::byte& byte : expected_) byte = static_cast<std::byte>(random());
    upload();
  }
  void upload() { bed_.write(memory_, expected_); }
  [[nodiscard]] std::byte* memory() const { return memory_; }
  [[nodiscard]] std::vector<std::byte>& expected() { return expected_; }
  /// The first byte that is not as expected.
  [[nodiscard]] testing::AssertionResult matches() const {
    std::vector<std::byte> found(expected_.size());
    bed_.read(found, memory_);
    const auto [want, have] = std::ranges::mismatch(expected_, found);
    if (want == expected_.end()) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "byte " << want - expected_.begin() << " of " << expected_.size() << " is "
           << std::to_integer<int>(*have) << ", expected " << std::to_integer<int>(*want);
  }

 private:
  CopyTestBed& bed_;
  std::byte* memory_;
  std::vector<std::byte> expected_;
};

class CopyEngineConformance : public testing::TestWithParam<CopyEngineUnderTest> {
 protected:
  static constexpr std::uint64_t kMagic = 0x3130746f6c73766bULL;

  void SetUp() override {
    if (const auto reason = GetParam().missing()) {
      const char* const required = std::getenv("KVSHARD_REQUIRE_GPU");
      if (required != nullptr && std::string{required} == "1") FAIL() << *reason;
      GTEST_SKIP() << *reason;
    }
    bed_ = GetParam().make();
    ASSERT_NE(bed_, nullptr);
  }

  CopyEngine& engine() { return bed_->engine(); }

  /// Progresses until nothing is in flight; false when that takes far too long.
  bool drain() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    while (engine().in_flight() != 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      if (engine().progress() != 0 || engine().wake_fd() < 0 || !engine().arm()) continue;
      pollfd wait{.fd = engine().wake_fd(), .events = POLLIN, .revents = 0};
      (void)poll(&wait, 1, 1000);
    }
    return true;
  }

  /// Where each plan's slot begins when they stand one behind another, and where the last ends.
  static std::vector<std::uint64_t> slot_offsets(const std::vector<BatchPlan>& plans) {
    std::vector<std::uint64_t> offsets{0};
    for (const BatchPlan& plan : plans)
      offsets.push_back(offsets.back() + slot_bytes_for(JobPlan{{plan}, nullptr}.bytes()));
    return offsets;
  }

  /// In memory, not in what is expected of it: a scatter of what was gathered puts the rows back.
  static void overwrite(Arena& pool, const std::vector<BatchPlan>& plans) {
    const std::vector<std::byte> before = pool.expected();
    for (const BatchPlan& plan : plans)
      JobPlan{{plan}, nullptr}.for_each_byte(
          [&](std::uint64_t at, std::uint64_t) { pool.expected()[at] = std::byte{0xee}; });
    pool.upload();
    pool.expected() = before;
  }

  Status run(const CopyJob& job) {
    CountingListener listener;
    Status status = engine().submit(job, listener);
    if (!status.ok()) {
      EXPECT_EQ(listener.calls, 0);
      return status;
    }
    EXPECT_TRUE(drain());
    EXPECT_EQ(listener.calls, 1);
    if (listener.ok) return {};
    return Error{listener.code, listener.message};
  }

  static SlotStamp stamp_for(std::uint64_t payload_bytes) {
    return {.lease = 0x1122334455667788ULL,
            .generation = 7,
            .chunk = 3,
            .payload_bytes = payload_bytes};
  }

  /// What gather makes of a slot: `pool` is the pool's arena.
  static std::vector<std::byte> oracle_slot(const JobPlan& plan, const std::vector<std::byte>& pool,
                                            const SlotStamp& stamp, bool checksum) {
    std::vector<std::byte> slot(slot_bytes_for(plan.bytes()));
    plan.for_each_byte([&](std::uint64_t from, std::uint64_t to) { slot[128 + to] = pool[from]; });
    const std::uint64_t sum =
        checksum ? oracle_checksum(std::span{slot}.subspan(128, slot.size() - 192)) : 0;
    const std::uint64_t words[8] = {stamp.lease, stamp.generation, stamp.chunk, stamp.payload_bytes,
                                    sum,         kMagic,           0,           0};
    std::memcpy(slot.data(), words, 64);
    std::memcpy(slot.data() + slot.size() - 64, words, 64);
    return slot;
  }

  static void put(Arena& arena, std::uint64_t at, const std::vector<std::byte>& bytes) {
    std::ranges::copy(bytes, arena.expected().begin() + static_cast<std::ptrdiff_t>(at));
  }

  /// Gathers and scatters `plans` and compares every byte of both arenas with the oracle.
  void check_both_ways(const std::vector<BatchPlan>& plans, std::uint64_t pool_bytes, bool checksum,
                       std::mt19937_64& random) {
    constexpr std::uint64_t kSlotAt = 48;  // 16-byte aligned, no more; canaries before and after
    Arena pool{*bed_, pool_bytes, random};
    const JobPlan plan{plans, pool.memory()};
    const std::uint64_t slot_bytes = slot_bytes_for(plan.bytes());
    Arena slots{*bed_, kSlotAt + slot_bytes + 80, random};
    CopyJob job{.direction = CopyJob::Direction::gather,
                .batches = plan.batches(),
                .slot = slots.memory() + kSlotAt,
                .stamp = stamp_for(plan.bytes()),
                .checksum = checksum,
                .after = nullptr};

    Status status = run(job);
    ASSERT_TRUE(status.ok()) << status.error().message;
    put(slots, kSlotAt, oracle_slot(plan, pool.expected(), job.stamp, checksum));
    ASSERT_TRUE(slots.matches()) << "slot after gather";
    ASSERT_TRUE(pool.matches()) << "gather wrote to its pool";

    const std::vector<std::byte> slot = slots.expected();
    pool.refill(random);
    plan.for_each_byte([&](std::uint64_t to, std::uint64_t from) {
      pool.expected()[to] = slot[kSlotAt + 128 + from];
    });
    job.direction = CopyJob::Direction::scatter;
    status = run(job);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_TRUE(pool.matches()) << "pool after scatter";
    ASSERT_TRUE(slots.matches()) << "scatter wrote to its slot";
  }

  /// Pulls `from` to `to` and compares every byte of both arenas with the oracle.
  void check_pull(const std::vector<BatchPlan>& from, std::uint64_t source_bytes,
                  const std::vector<BatchPlan>& to, std::uint64_t pool_bytes,
                  std::mt19937_64& random) {
    Arena source{*bed_, source_bytes, random};
    Arena pool{*bed_, pool_bytes, random};
    const JobPlan sources{from, source.memory()};
    const JobPlan batches{to, pool.memory()};
    ASSERT_EQ(sources.bytes(), batches.bytes());
    const Status status = run(pull_job(sources, batches));
    ASSERT_TRUE(status.ok()) << status.error().message;
    expect_pulled(sources, source, batches, pool);
    ASSERT_TRUE(pool.matches()) << "pool after pull";
    ASSERT_TRUE(source.matches()) << "pull wrote to its source";
  }

  static CopyJob pull_job(const JobPlan& sources, const JobPlan& batches) {
    CopyJob job;
    job.direction = CopyJob::Direction::pull;
    job.batches = batches.batches();
    job.sources = sources.batches();
    job.stamp.payload_bytes = batches.bytes();
    return job;
  }

  static void expect_pulled(const JobPlan& sources, Arena& source, const JobPlan& batches,
                            Arena& pool) {
    std::vector<std::byte> slot(sources.bytes());
    sources.for_each_byte(
        [&](std::uint64_t at, std::uint64_t payload) { slot[payload] = source.expected()[at]; });
    batches.for_each_byte(
        [&](std::uint64_t at, std::uint64_t payload) { pool.expected()[at] = slot[payload]; });
  }

  std::unique_ptr<CopyTestBed> bed_;
};

TEST_P(CopyEngineConformance, MovesExactBytesOfRandomBatches) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random{seed};
    std::vector<BatchPlan> plans;
    std::uint64_t cursor = 0;
    const std::size_t batches = random_in(random, 1, 4);
    for (std::size_t batch = 0; batch < batches; ++batch) {
      const std::uint64_t unit = std::uint64_t{1} << random_in(random, 0, 4);
      cursor = (cursor + unit - 1) / unit * unit;
      plans.push_back(place_batch(random, random_shape(random, unit), random_in(random, 1, 5),
                                  random_in(random, 1, 9), unit, cursor));
    }
    check_both_ways(plans, cursor + 64, random_in(random, 0, 1) == 1, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CopyEngineConformance, MovesEverySmallSizeAtEveryAlignment) {
  std::mt19937_64 random{11};
  for (std::uint64_t size = 1; size <= 40; size += size < 18 ? 1 : 11)
    for (std::uint64_t shift = 0; shift < 16; shift += shift < 4 ? 1 : 4) {
      SCOPED_TRACE(testing::Message() << "size " << size << ", shift " << shift);
      const BatchPlan plan{
          .buffers = {shift, 256 + shift}, .offsets = {64, 0, 128}, .shape = {.row_bytes = size}};
      check_both_ways({plan}, 512, size % 2 == 0, random);
      if (HasFatalFailure()) return;
    }
}

// Shapes of real models: one rank's pages of Llama-3 70B (token-major, whole and a head slice of
// half of the heads; head-major), DeepSeek MLA, Qwen3-30B-A3B. Fewer layers and pages, the same
// rows.
TEST_P(CopyEngineConformance, MovesExactBytesOfModelShapes) {
  struct Named {
    const char* name;
    FragmentShape shape;
    std::uint64_t page_bytes;
  };
  constexpr Named kShapes[] = {
      {"llama-3 70b tp1, 16 tokens", {.row_bytes = 16 * 8 * 128 * 2}, 16 * 8 * 128 * 2},
      {"llama-3 70b tp8, 64 tokens", {.row_bytes = 64 * 128 * 2}, 64 * 128 * 2},
      {"llama-3 70b, heads 4-7 of 8",
       {.outer = 16, .outer_stride = 8 * 128 * 2, .row_bytes = 4 * 128 * 2},
       16 * 8 * 128 * 2},
      {"llama-3 70b head-major, tokens in gaps",
       {.outer = 8, .outer_stride = 16 * 512, .inner = 16, .inner_stride = 512, .row_bytes = 256},
       16 * 8 * 512},
      {"token-major read as head-major",
       {.outer = 8, .outer_stride = 256, .inner = 16, .inner_stride = 8 * 256, .row_bytes = 256},
       16 * 8 * 256},
      {"deepseek mla, 64 tokens", {.row_bytes = 64 * 576 * 2}, 64 * 576 * 2},
      {"deepseek indexer keys with scales", {.row_bytes = 64 * 132}, 64 * 132},
      {"qwen3-30b-a3b tp2, 16 tokens", {.row_bytes = 16 * 2 * 128 * 2}, 16 * 2 * 128 * 2},
  };
  std::mt19937_64 random{5};
  for (const Named& named : kShapes) {
    SCOPED_TRACE(named.name);
    BatchPlan plan{.buffers = {}, .offsets = {}, .shape = named.shape};
    constexpr std::uint64_t kPages = 7;
    for (std::uint64_t layer = 0; layer < 4; ++layer)
      plan.buffers.push_back(layer * kPages * named.page_bytes);
    for (const std::uint64_t page : {5, 1, 2, 6}) plan.offsets.push_back(page * named.page_bytes);
    if (named.shape.row_bytes == 4 * 128 * 2)
      for (std::uint64_t& offset : plan.offsets) offset += 4 * 128 * 2;
    check_both_ways({plan}, 4 * kPages * named.page_bytes, true, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CopyEngineConformance, MovesExactBytesOfBigJobs) {
  std::mt19937_64 random{17};
  for (const std::uint64_t row_bytes :
       {std::uint64_t{16384}, std::uint64_t{1000}, std::uint64_t{333}}) {
    for (const bool checksum : {false, true}) {
      SCOPED_TRACE(testing::Message() << "rows of " << row_bytes << ", checksum " << checksum);
      std::uint64_t cursor = row_bytes % 16 == 0 ? 0 : 3;
      const std::size_t pages = GetParam().big_bytes / 5 / row_bytes;
      const std::uint64_t unit = row_bytes % 16 == 0 ? 16 : 1;
      const BatchPlan plan = place_batch(random, {.row_bytes = row_bytes}, 5, pages, unit, cursor);
      check_both_ways({plan}, cursor + 64, checksum, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CopyEngineConformance, StampsASlotThatHoldsNothing) {
  std::mt19937_64 random{2};
  check_both_ways({}, 64, false, random);
  check_both_ways({}, 64, true, random);
  const BatchPlan no_pages{.buffers = {0, 16}, .offsets = {}, .shape = {.row_bytes = 16}};
  const BatchPlan no_buffers{.buffers = {}, .offsets = {0, 16}, .shape = {.row_bytes = 16}};
  const BatchPlan no_rows{.buffers = {0}, .offsets = {0}, .shape = {.outer = 0, .row_bytes = 16}};
  const BatchPlan no_bytes{.buffers = {0}, .offsets = {0}, .shape = {.inner = 3, .row_bytes = 0}};
  check_both_ways({no_pages, no_buffers, no_rows, no_bytes}, 64, true, random);
  const BatchPlan one{.buffers = {1}, .offsets = {2}, .shape = {.row_bytes = 5}};
  check_both_ways({no_pages, one, no_rows, one}, 64, true, random);
}

TEST_P(CopyEngineConformance, ReportsAnotherStampAsDataLoss) {
  std::mt19937_64 random{3};
  Arena pool{*bed_, 4096, random};
  const JobPlan plan{{{.buffers = {0}, .offsets = {512, 0}, .shape = {.row_bytes = 500}}},
                     pool.memory()};
  Arena slot{*bed_, slot_bytes_for(plan.bytes()), random};
  const CopyJob gather{.direction = CopyJob::Direction::gather,
                       .batches = plan.batches(),
                       .slot = slot.memory(),
                       .stamp = stamp_for(plan.bytes()),
                       .checksum = false,
                       .after = nullptr};
  CopyJob scatter = gather;
  scatter.direction = CopyJob::Direction::scatter;
  ASSERT_TRUE(run(gather).ok());
  ASSERT_TRUE(run(scatter).ok());
  const std::vector<std::byte> good = oracle_slot(plan, pool.expected(), gather.stamp, false);

  const auto expect_loss = [&](const CopyJob& job, const char* what) {
    SCOPED_TRACE(what);
    const Status status = run(job);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::data_loss);
    EXPECT_FALSE(status.error().message.empty());
  };
  CopyJob other = scatter;
  other.stamp.lease ^= 1;
  expect_loss(other, "lease");
  other = scatter;
  other.stamp.generation += 1;
  expect_loss(other, "generation");
  other = scatter;
  other.stamp.chunk += 1;
  expect_loss(other, "chunk");
  // A slot of which a byte of one mark only is wrong: torn, or never filled.
  for (const std::size_t word : {0, 1, 2, 3, 5})
    for (const std::size_t mark : {std::size_t{0}, good.size() - 64}) {
      slot.expected() = good;
      slot.expected()[mark + word * 8 + 2] ^= std::byte{0x10};
      slot.upload();
      expect_loss(scatter, mark == 0 ? "header" : "trailer");
    }
  slot.expected() = good;
  slot.upload();
  EXPECT_TRUE(run(scatter).ok());
}

TEST_P(CopyEngineConformance, ReportsAnotherChecksumAsDataLoss) {
  std::mt19937_64 random{4};
  for (const std::uint64_t row_bytes :
       {std::uint64_t{1024}, std::uint64_t{1000}, std::uint64_t{333}}) {
    SCOPED_TRACE(row_bytes);
    Arena pool{*bed_, 8192, random};
    const JobPlan plan{
        {{.buffers = {0, 4096}, .offsets = {0, 2048}, .shape = {.row_bytes = row_bytes}}},
        pool.memory()};
    Arena slot{*bed_, slot_bytes_for(plan.bytes()), random};
    CopyJob job{.direction = CopyJob::Direction::gather,
                .batches = plan.batches(),
                .slot = slot.memory(),
                .stamp = stamp_for(plan.bytes()),
                .checksum = true,
                .after = nullptr};
    ASSERT_TRUE(run(job).ok());
    job.direction = CopyJob::Direction::scatter;
    ASSERT_TRUE(run(job).ok());
    const std::vector<std::byte> good = oracle_slot(plan, pool.expected(), job.stamp, true);
    const auto expect = [&](const std::vector<std::byte>& bytes, bool checksum, bool ok) {
      slot.expected() = bytes;
      slot.upload();
      job.checksum = checksum;
      const Status status = run(job);
      ASSERT_EQ(status.ok(), ok);
      if (!ok) {
        EXPECT_EQ(status.error().code, ErrorCode::data_loss);
      }
    };
    for (const std::size_t bit : {std::size_t{0}, std::size_t{4097}, plan.bytes() * 8 - 1}) {
      std::vector<std::byte> bad = good;
      bad[128 + bit / 8] ^= std::byte{1} << bit % 8;
      expect(bad, true, false);
      expect(bad, false, true);
    }
    std::vector<std::byte> swapped = good;  // the same words in another order
    std::swap_ranges(swapped.begin() + 128, swapped.begin() + 144, swapped.begin() + 192);
    expect(swapped, true, false);
    std::vector<std::byte> unsummed = good;  // gathered without a checksum
    std::fill_n(unsummed.begin() + 32, 8, std::byte{0});
    expect(unsummed, true, false);
    expect(good, true, true);
  }
}

TEST_P(CopyEngineConformance, RefusesBatchesThatDoNotFitTheStamp) {
  std::mt19937_64 random{6};
  Arena pool{*bed_, 1024, random};
  Arena slot{*bed_, 1024, random};
  const JobPlan plan{{{.buffers = {0, 512}, .offsets = {0, 100}, .shape = {.row_bytes = 100}}},
                     pool.memory()};
  CopyJob job{.direction = CopyJob::Direction::gather,
              .batches = plan.batches(),
              .slot = slot.memory(),
              .stamp = stamp_for(plan.bytes()),
              .checksum = false,
              .after = nullptr};
  const auto expect_refused = [&](const CopyJob& bad, const char* what) {
    SCOPED_TRACE(what);
    const Status status = run(bad);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
    EXPECT_EQ(engine().in_flight(), 0u);
  };
  CopyJob bad = job;
  bad.stamp.payload_bytes -= 1;
  expect_refused(bad, "one byte short");
  bad.stamp.payload_bytes += 2;
  expect_refused(bad, "one byte over");
  bad = job;
  bad.slot = nullptr;
  expect_refused(bad, "no slot");
  bad.slot = slot.memory() + 8;
  expect_refused(bad, "slot aligned to 8");
  bad = job;
  std::byte* const nowhere[2] = {pool.memory(), nullptr};
  FragmentBatch batch = plan.batches()[0];
  batch.buffers = nowhere;
  bad.batches = {&batch, 1};
  expect_refused(bad, "null buffer");
  // 2^32 * 2^32 rows of 1 byte, or 4 buffers of 2^62 bytes: the sum wraps to 0.
  batch = plan.batches()[0];
  batch.shape = {.outer = 1U << 31, .inner = 1U << 31, .row_bytes = 1};
  bad.stamp.payload_bytes = batch.bytes();
  ASSERT_EQ(bad.stamp.payload_bytes, 0u);
  expect_refused(bad, "bytes wrap");
  EXPECT_TRUE(pool.matches());
  EXPECT_TRUE(slot.matches());
  EXPECT_TRUE(run(job).ok());
}

TEST_P(CopyEngineConformance, EndsEachOfManyJobsOnceAndInOrder) {
  constexpr std::size_t kJobs = 300;
  struct OrderListener final : CopyListener {
    void copy_done(Status status) noexcept override {
      ++calls;
      ok = status.ok();
      order = (*ended)++;
    }
    std::size_t* ended{nullptr};
    std::size_t order{0};
    int calls{0};
    bool ok{false};
  };
  std::mt19937_64 random{7};
  std::vector<BatchPlan> plans(kJobs);
  std::uint64_t cursor = 0;
  for (BatchPlan& plan : plans)
    plan = place_batch(random, {.row_bytes = random_in(random, 1, 200)}, random_in(random, 1, 3),
                       random_in(random, 1, 6), 1, cursor);
  Arena pool{*bed_, cursor, random};
  const std::vector<std::uint64_t> slot_at = slot_offsets(plans);
  Arena slots{*bed_, slot_at.back(), random};

  for (const auto direction : {CopyJob::Direction::gather, CopyJob::Direction::scatter}) {
    std::size_t ended = 0;
    std::deque<OrderListener> listeners(kJobs);
    for (std::size_t i = 0; i < kJobs; ++i) {
      listeners[i].ended = &ended;
      // The plan, and all that the job borrows from it, is gone when submit() has returned.
      const JobPlan plan{{plans[i]}, pool.memory()};
      SlotStamp stamp = stamp_for(plan.bytes());
      stamp.chunk = i;
      const CopyJob job{.direction = direction,
                        .batches = plan.batches(),
                        .slot = slots.memory() + slot_at[i],
                        .stamp = stamp,
                        .checksum = i % 3 == 0,
                        .after = nullptr};
      ASSERT_TRUE(engine().submit(job, listeners[i]).ok());
      EXPECT_EQ(engine().in_flight(), i + 1);
      if (direction == CopyJob::Direction::gather)
        put(slots, slot_at[i], oracle_slot(plan, pool.expected(), stamp, i % 3 == 0));
    }
    if (direction == CopyJob::Direction::scatter) {
      EXPECT_EQ(ended, 0u);
    }
    ASSERT_TRUE(drain());
    EXPECT_EQ(ended, kJobs);
    for (std::size_t i = 0; i < kJobs; ++i) {
      EXPECT_EQ(listeners[i].calls, 1);
      EXPECT_TRUE(listeners[i].ok);
      EXPECT_EQ(listeners[i].order, i);
    }
    EXPECT_EQ(engine().progress(), 0u);
    ASSERT_TRUE(slots.matches());
    if (direction == CopyJob::Direction::scatter) {
      ASSERT_TRUE(pool.matches());
    } else {
      overwrite(pool, plans);
    }
  }
}

// One launch may hold a job of one row beside one of thousands.
TEST_P(CopyEngineConformance, MovesExactBytesOfUnlikeJobsAtOnce) {
  std::mt19937_64 random{23};
  std::vector<BatchPlan> plans(24);
  std::uint64_t cursor = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const std::uint64_t rows = i % 7 == 3 ? random_in(random, 1000, 3000) : random_in(random, 1, 3);
    plans[i] = place_batch(random, {.row_bytes = 64}, 1, rows, 16, cursor);
  }
  Arena pool{*bed_, cursor, random};
  const std::vector<std::uint64_t> slot_at = slot_offsets(plans);
  Arena slots{*bed_, slot_at.back(), random};
  for (const auto direction : {CopyJob::Direction::gather, CopyJob::Direction::scatter}) {
    CountingListener listener;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const JobPlan plan{{plans[i]}, pool.memory()};
      const SlotStamp stamp = stamp_for(plan.bytes());
      const CopyJob job{.direction = direction,
                        .batches = plan.batches(),
                        .slot = slots.memory() + slot_at[i],
                        .stamp = stamp,
                        .checksum = false,
                        .after = nullptr};
      ASSERT_TRUE(engine().submit(job, listener).ok());
      if (direction == CopyJob::Direction::gather)
        put(slots, slot_at[i], oracle_slot(plan, pool.expected(), stamp, false));
    }
    ASSERT_TRUE(drain());
    EXPECT_EQ(listener.calls, static_cast<int>(plans.size()));
    EXPECT_EQ(listener.failures, 0) << listener.message;
    ASSERT_TRUE(slots.matches());
    if (direction == CopyJob::Direction::scatter) {
      ASSERT_TRUE(pool.matches());
    } else {
      overwrite(pool, plans);
    }
  }
}

TEST_P(CopyEngineConformance, AListenerMaySubmit) {
  struct Relay final : CopyListener {
    void copy_done(Status status) noexcept override {
      ok = ok && status.ok();
      if (++calls < 20) ok = ok && engine->submit(job, *this).ok();
    }
    CopyEngine* engine{nullptr};
    CopyJob job;
    int calls{0};
    bool ok{true};
  };
  std::mt19937_64 random{8};
  Arena pool{*bed_, 1024, random};
  Arena slot{*bed_, 1024, random};
  const JobPlan plan{{{.buffers = {0}, .offsets = {0, 256}, .shape = {.row_bytes = 64}}},
                     pool.memory()};
  Relay relay;
  relay.engine = &engine();
  relay.job = {.direction = CopyJob::Direction::gather,
               .batches = plan.batches(),
               .slot = slot.memory(),
               .stamp = stamp_for(plan.bytes()),
               .checksum = true,
               .after = nullptr};
  ASSERT_TRUE(engine().submit(relay.job, relay).ok());
  ASSERT_TRUE(drain());
  EXPECT_EQ(relay.calls, 20);
  EXPECT_TRUE(relay.ok);
}

TEST_P(CopyEngineConformance, DoesNotAllocateOnceWarm) {
  std::mt19937_64 random{9};
  std::uint64_t cursor = 0;
  std::vector<BatchPlan> plans;
  for (std::size_t i = 0; i < 12; ++i)
    plans.push_back(place_batch(random, {.row_bytes = 48}, 4, 1 + i * 3, 16, cursor));
  Arena pool{*bed_, cursor, random};
  std::deque<JobPlan> jobs;
  for (const BatchPlan& plan : plans)
    jobs.emplace_back(std::vector<BatchPlan>{plan}, pool.memory());
  constexpr std::uint64_t kSlotBytes = 32768;
  Arena slots{*bed_, plans.size() * kSlotBytes, random};
  std::deque<CountingListener> listeners(plans.size());
  Arena other{*bed_, cursor, random};
  std::deque<JobPlan> sources;
  for (const BatchPlan& plan : plans)
    sources.emplace_back(std::vector<BatchPlan>{plan}, other.memory());

  const auto round = [&] {
    for (std::size_t i = 0; i < jobs.size(); ++i)
      if (!engine().submit(pull_job(sources[i], jobs[i]), listeners[i]).ok()) return false;
    if (!drain()) return false;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const CopyJob job{.direction = CopyJob::Direction::gather,
                        .batches = jobs[i].batches(),
                        .slot = slots.memory() + i * kSlotBytes,
                        .stamp = stamp_for(jobs[i].bytes()),
                        .checksum = true,
                        .after = nullptr};
      if (!engine().submit(job, listeners[i]).ok()) return false;
    }
    return drain();
  };
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(round());
  const std::size_t before = allocation_count();
  bool all = true;
  for (int i = 0; i < 20; ++i) all = round() && all;
  const std::size_t after = allocation_count();
  EXPECT_TRUE(all);
  EXPECT_EQ(after - before, 0u);
}

TEST_P(CopyEngineConformance, PullsExactBytesHoweverEachSideIsCut) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random{seed};
    const std::uint64_t unit = std::uint64_t{1} << random_in(random, 0, 4);
    std::uint64_t source_bytes = unit * random_in(random, 0, 3);
    std::uint64_t pool_bytes = unit * random_in(random, 0, 3);
    const std::uint64_t bytes = unit * random_in(random, 1, 3000);
    const auto from = place_batches_of(random, bytes, unit, source_bytes);
    const auto to = place_batches_of(random, bytes, unit, pool_bytes);
    check_pull(from, source_bytes + 64, to, pool_bytes + 64, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CopyEngineConformance, PullsEverySmallSizeAtEveryPairOfAlignments) {
  std::mt19937_64 random{12};
  for (const std::uint64_t size : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64})
    for (const std::uint64_t from : {0, 1, 2, 4, 8, 15})
      for (const std::uint64_t to : {0, 1, 2, 3, 8}) {
        SCOPED_TRACE(testing::Message() << "size " << size << ", " << from << " to " << to);
        const BatchPlan source{
            .buffers = {from, 300 + from}, .offsets = {128, 0}, .shape = {.row_bytes = size}};
        const BatchPlan pool{
            .buffers = {to, 256 + to}, .offsets = {64, 160}, .shape = {.row_bytes = size}};
        check_pull({source}, 640, {pool}, 640, random);
        if (HasFatalFailure()) return;
      }
}

// Whole pages of one pool to other pages of another: Llama-3 70B, TP 1 to TP 8 (a head of each token), and
// token-major to head-major with gaps.
TEST_P(CopyEngineConformance, PullsExactBytesOfModelShapes) {
  std::mt19937_64 random{13};
  constexpr std::uint64_t kPage = 16 * 8 * 256;
  const auto pages = [](std::uint64_t page_bytes, const FragmentShape& shape, std::uint64_t first,
                        std::vector<std::uint64_t> order) {
    BatchPlan plan{.buffers = {}, .offsets = {}, .shape = shape};
    for (std::uint64_t buffer = 0; buffer < 6; ++buffer)
      plan.buffers.push_back(buffer * 7 * page_bytes);
    for (const std::uint64_t page : order) plan.offsets.push_back(page * page_bytes + first);
    return plan;
  };
  {
    SCOPED_TRACE("a head of eight");
    check_pull({pages(kPage, {.outer = 16, .outer_stride = 8 * 256, .row_bytes = 256}, 5 * 256,
                      {6, 1, 3, 2})},
               6 * 7 * kPage, {pages(kPage / 8, {.row_bytes = kPage / 8}, 0, {1, 2, 3, 4})},
               6 * 7 * kPage / 8, random);
  }
  if (HasFatalFailure()) return;
  SCOPED_TRACE("token-major to head-major");
  check_pull(
      {pages(
          kPage,
          {.outer = 8, .outer_stride = 256, .inner = 16, .inner_stride = 8 * 256, .row_bytes = 256},
          0, {5, 1})},
      6 * 7 * kPage,
      {pages(2 * kPage,
             {.outer = 8,
              .outer_stride = 16 * 512,
              .inner = 16,
              .inner_stride = 512,
              .row_bytes = 256},
             0, {2, 6})},
      6 * 7 * 2 * kPage, random);
}

TEST_P(CopyEngineConformance, PullsExactBytesOfBigJobs) {
  std::mt19937_64 random{18};
  for (const std::uint64_t row_bytes :
       {std::uint64_t{16384}, std::uint64_t{1040}, std::uint64_t{1000}, std::uint64_t{333}}) {
    SCOPED_TRACE(testing::Message() << "rows of " << row_bytes);
    const std::uint64_t unit = row_bytes % 16 == 0 ? 16 : 1;
    std::uint64_t source_bytes = unit == 16 ? 0 : 5;
    std::uint64_t pool_bytes = unit == 16 ? 16 : 2;
    const std::size_t pages = GetParam().big_bytes / 6 / row_bytes;
    // Three rows a fragment there, one here: both sides are walked apart.
    const BatchPlan from =
        place_batch(random, {.outer = 3, .outer_stride = row_bytes + unit, .row_bytes = row_bytes},
                    2, pages, unit, source_bytes);
    const BatchPlan to = place_batch(random, {.row_bytes = row_bytes}, 6, pages, unit, pool_bytes);
    check_pull({from}, source_bytes + 64, {to}, pool_bytes + 64, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CopyEngineConformance, EndsEachOfManyPullsOnce) {
  constexpr std::size_t kJobs = 150;  // more than a launch, and a launch's segments, hold
  std::mt19937_64 random{19};
  std::uint64_t source_bytes = 0;
  std::uint64_t pool_bytes = 0;
  std::vector<std::pair<std::vector<BatchPlan>, std::vector<BatchPlan>>> plans;
  for (std::size_t i = 0; i < kJobs; ++i) {
    const std::uint64_t unit = i < 90 ? 16 : std::uint64_t{1} << random_in(random, 0, 4);
    const std::uint64_t bytes = unit * random_in(random, 0, 40);
    source_bytes = (source_bytes + 15) / 16 * 16;
    pool_bytes = (pool_bytes + 15) / 16 * 16;
    auto from = place_batches_of(random, bytes, unit, source_bytes);
    plans.emplace_back(std::move(from), place_batches_of(random, bytes, unit, pool_bytes));
  }
  Arena source{*bed_, source_bytes + 64, random};
  Arena pool{*bed_, pool_bytes + 64, random};
  std::deque<CountingListener> listeners(kJobs);
  for (std::size_t i = 0; i < kJobs; ++i) {
    // The plans, and all that the job borrows from them, are gone when submit() has returned.
    const JobPlan sources{plans[i].first, source.memory()};
    const JobPlan batches{plans[i].second, pool.memory()};
    ASSERT_TRUE(engine().submit(pull_job(sources, batches), listeners[i]).ok());
    expect_pulled(sources, source, batches, pool);
  }
  ASSERT_TRUE(drain());
  for (const CountingListener& listener : listeners) {
    EXPECT_EQ(listener.calls, 1);
    EXPECT_TRUE(listener.ok) << listener.message;
  }
  EXPECT_TRUE(pool.matches());
  EXPECT_TRUE(source.matches());
}

TEST_P(CopyEngineConformance, RefusesAPullThatDoesNotAddUp) {
  std::mt19937_64 random{20};
  Arena source{*bed_, 1024, random};
  Arena pool{*bed_, 1024, random};
  Arena slot{*bed_, 1024, random};
  const BatchPlan whole{.buffers = {0, 512}, .offsets = {0, 100}, .shape = {.row_bytes = 100}};
  const BatchPlan short_of{.buffers = {0, 512}, .offsets = {0, 100}, .shape = {.row_bytes = 99}};
  const JobPlan sources{{whole}, source.memory()};
  const JobPlan shorter{{short_of}, source.memory()};
  const JobPlan batches{{whole}, pool.memory()};
  const CopyJob job = pull_job(sources, batches);
  const auto expect_refused = [&](const CopyJob& bad, const char* message) {
    SCOPED_TRACE(message);
    const Status status = run(bad);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
    EXPECT_NE(status.error().message.find(message), std::string::npos) << status.error().message;
    EXPECT_EQ(engine().in_flight(), 0u);
  };
  CopyJob bad = job;
  bad.sources = shorter.batches();
  expect_refused(bad, "sources hold 396 bytes, the stamp says payload_bytes 400");
  bad = job;
  bad.stamp.payload_bytes = 396;
  expect_refused(bad, "batches hold 400 bytes, the stamp says payload_bytes 396");
  bad = job;
  bad.sources = {};
  expect_refused(bad, "sources hold 0 bytes");
  bad = job;
  std::byte* const nowhere[2] = {source.memory(), nullptr};
  FragmentBatch batch = sources.batches()[0];
  batch.buffers = nowhere;
  bad.sources = {&batch, 1};
  expect_refused(bad, "sources: one of 2 pool buffers is null");
  bad = job;
  bad.slot = slot.memory();
  expect_refused(bad, "a pull has no slot");
  bad = job;
  bad.checksum = true;
  expect_refused(bad, "a pull has no slot and no checksum");
  bad = job;
  bad.direction = CopyJob::Direction::gather;
  bad.slot = slot.memory();
  expect_refused(bad, "1 source batches in a job that is no pull");
  EXPECT_TRUE(pool.matches());
  EXPECT_TRUE(run(job).ok());
}

}  // namespace kvshard::test
