#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kvshard/copy_engine.hpp"

// Copy jobs for tests: random ones, and the order of their bytes, one byte at a time.
namespace kvshard::test {

/// Fragments of one shape in an arena, as offsets from its start.
struct BatchPlan {
  std::vector<std::uint64_t> buffers;
  std::vector<std::uint64_t> offsets;
  FragmentShape shape;
};

/// Batches, with the spans that a CopyJob borrows.
class JobPlan {
 public:
  JobPlan(std::vector<BatchPlan> plans, std::byte* pool) : plans_{std::move(plans)} {
    for (const BatchPlan& plan : plans_) {
      auto& buffers = buffers_.emplace_back();
      for (const std::uint64_t at : plan.buffers) buffers.push_back(pool + at);
      batches_.push_back({buffers, plan.offsets, plan.shape});
      bytes_ += batches_.back().bytes();
    }
  }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::span<const FragmentBatch> batches() const { return batches_; }

  /// Calls visit(pool_offset, payload_offset) for every byte, in slot order.
  template <typename Visit>
  void for_each_byte(Visit&& visit) const {
    std::uint64_t payload = 0;
    for (const BatchPlan& plan : plans_)
      for (const std::uint64_t buffer : plan.buffers)
        for (const std::uint64_t offset : plan.offsets)
          for (std::uint64_t outer = 0; outer < plan.shape.outer; ++outer)
            for (std::uint64_t inner = 0; inner < plan.shape.inner; ++inner)
              for (std::uint64_t byte = 0; byte < plan.shape.row_bytes; ++byte)
                visit(buffer + offset + outer * plan.shape.outer_stride +
                          inner * plan.shape.inner_stride + byte,
                      payload++);
  }

 private:
  std::vector<BatchPlan> plans_;
  std::deque<std::vector<std::byte*>> buffers_;
  std::vector<FragmentBatch> batches_;
  std::uint64_t bytes_{0};
};

inline std::uint64_t random_in(std::mt19937_64& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>{low, high}(random);
}

/// Bytes from a fragment's offset to the end of its last row.
inline std::uint64_t extent(const FragmentShape& shape) {
  if (shape.bytes() == 0) return 0;
  return (shape.outer - 1) * shape.outer_stride + (shape.inner - 1) * shape.inner_stride +
         shape.row_bytes;
}

/// A shape whose rows do not overlap and whose every number is a multiple of `unit`.
inline FragmentShape random_shape(std::mt19937_64& random, std::uint64_t unit) {
  FragmentShape shape;
  shape.outer = static_cast<std::uint32_t>(random_in(random, 1, 5));
  shape.inner = static_cast<std::uint32_t>(random_in(random, 1, 5));
  shape.row_bytes = unit * random_in(random, 1, random_in(random, 0, 3) == 0 ? 400 : 12);
  const auto gap = [&] { return unit * random_in(random, 0, 1) * random_in(random, 0, 3); };
  if (random_in(random, 0, 1) == 0) {  // rows of one outer index stand together
    shape.inner_stride = shape.row_bytes + gap();
    shape.outer_stride = shape.inner * shape.inner_stride + gap();
  } else {  // permuted
    shape.outer_stride = shape.row_bytes + gap();
    shape.inner_stride = shape.outer * shape.outer_stride + gap();
  }
  return shape;
}

/// Places `pages` fragments in each of `buffers` buffers from `cursor` on, shuffled; none overlap.
inline BatchPlan place_batch(std::mt19937_64& random, const FragmentShape& shape,
                             std::size_t buffers, std::size_t pages, std::uint64_t unit,
                             std::uint64_t& cursor) {
  const auto gap = [&] { return unit * random_in(random, 0, 2) * random_in(random, 0, 2); };
  BatchPlan plan{.buffers = {}, .offsets = {}, .shape = shape};
  std::uint64_t buffer_bytes = 0;
  for (std::size_t page = 0; page < pages; ++page) {
    buffer_bytes += gap();
    plan.offsets.push_back(buffer_bytes);
    buffer_bytes += extent(shape);
  }
  if (random_in(random, 0, 2) != 0) std::ranges::shuffle(plan.offsets, random);
  for (std::size_t buffer = 0; buffer < buffers; ++buffer) {
    cursor += gap();
    plan.buffers.push_back(cursor);
    cursor += buffer_bytes;
  }
  return plan;
}

/// Batches that hold `bytes` bytes, cut at random into multiples of `unit`, placed from `cursor` on.
inline std::vector<BatchPlan> place_batches_of(std::mt19937_64& random, std::uint64_t bytes,
                                               std::uint64_t unit, std::uint64_t& cursor) {
  std::vector<BatchPlan> plans;
  while (bytes != 0) {
    FragmentShape shape = random_shape(random, unit);
    std::uint64_t fragments = bytes / shape.bytes();
    if (fragments == 0) {  // what is left
      shape = {.row_bytes = bytes};
      fragments = 1;
    }
    const std::uint64_t buffers = random_in(random, 1, std::min<std::uint64_t>(fragments, 4));
    const std::uint64_t pages =
        random_in(random, 1, std::min<std::uint64_t>(fragments / buffers, 9));
    plans.push_back(place_batch(random, shape, buffers, pages, unit, cursor));
    bytes -= buffers * pages * shape.bytes();
  }
  return plans;
}

/// The checksum as docs/architecture.md defines it, over a payload padded with zeros.
inline std::uint64_t oracle_checksum(std::span<const std::byte> padded) {
  std::uint64_t sum = 0;
  for (std::uint64_t at = 0; at < padded.size(); at += 8) {
    std::uint64_t word = 0;
    for (std::uint64_t byte = 8; byte-- > 0;)
      word = word << 8 | std::to_integer<std::uint64_t>(padded[at + byte]);
    const std::uint64_t mixed = word ^ (at / 8 + 1) * 0x9e3779b97f4a7c15ULL;
    sum += (mixed % (1ULL << 32)) * (mixed / (1ULL << 32)) + (word << 32 | word >> 32);
  }
  return sum;
}

}  // namespace kvshard::test
