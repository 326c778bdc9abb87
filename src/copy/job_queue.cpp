#include "copy/job_queue.hpp"

#include <fmt/format.h>

#include <limits>

#include "base/try.hpp"

namespace kvshard {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

// a * b, or the largest number when that does not fit: it then differs from every payload size,
// since a slot of that size cannot be.
constexpr std::uint64_t saturating_multiply(std::uint64_t a, std::uint64_t b) noexcept {
  return b != 0 && a > kMax / b ? kMax : a * b;
}

constexpr std::uint64_t batch_bytes(const FragmentBatch& batch) noexcept {
  const std::uint64_t rows = std::uint64_t{batch.shape.outer} * batch.shape.inner;
  const std::uint64_t fragment_bytes = saturating_multiply(rows, batch.shape.row_bytes);
  return saturating_multiply(saturating_multiply(fragment_bytes, batch.buffers.size()),
                             batch.offsets.size());
}

FragmentShape merge_rows(FragmentShape shape) noexcept {
  const auto merge_inner = [&shape] {
    if (shape.inner_stride != shape.row_bytes) return;
    shape.row_bytes *= shape.inner;
    shape.inner = 1;
  };
  merge_inner();
  if (shape.inner == 1) {
    shape.inner = shape.outer;
    shape.inner_stride = shape.outer_stride;
    shape.outer = 1;
    merge_inner();
  }
  if (shape.inner == 1) shape.inner_stride = 0;
  if (shape.outer == 1) shape.outer_stride = 0;
  return shape;
}

// The bits of everything that a row's place and length are made of.
std::uint64_t placement_bits(const QueuedBatch& batch) noexcept {
  std::uint64_t bits = batch.shape.row_bytes | batch.shape.inner_stride | batch.shape.outer_stride |
                       batch.payload_offset;
  for (std::byte* const buffer : batch.buffers) bits |= reinterpret_cast<std::uintptr_t>(buffer);
  for (const std::uint64_t offset : batch.offsets) bits |= offset;
  return bits;
}

Status check_batches(std::span<const FragmentBatch> batches, const char* what,
                     std::uint64_t payload_bytes) {
  std::uint64_t total = 0;
  for (const FragmentBatch& batch : batches) {
    const std::uint64_t bytes = batch_bytes(batch);
    total = bytes > kMax - total ? kMax : total + bytes;
    if (bytes != 0 && std::ranges::find(batch.buffers, nullptr) != batch.buffers.end())
      return Error{ErrorCode::invalid_argument,
                   fmt::format("{}: one of {} pool buffers is null", what, batch.buffers.size())};
  }
  if (total == payload_bytes && total != kMax) return {};
  return Error{
      ErrorCode::invalid_argument,
      fmt::format("{} hold {} bytes, the stamp says payload_bytes {}", what, total, payload_bytes)};
}

Status check_job(const CopyJob& job) {
  const bool pull = job.direction == CopyJob::Direction::pull;
  if (pull && (job.slot != nullptr || job.checksum))
    return Error{ErrorCode::invalid_argument,
                 fmt::format("a pull has no slot and no checksum, but slot is {} and checksum {}",
                             static_cast<const void*>(job.slot), job.checksum)};
  if (!pull && !job.sources.empty())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} source batches in a job that is no pull", job.sources.size())};
  if (!pull && (job.slot == nullptr || reinterpret_cast<std::uintptr_t>(job.slot) % 16 != 0))
    return Error{ErrorCode::invalid_argument, fmt::format("slot {} is null or not 16-byte aligned",
                                                          static_cast<const void*>(job.slot))};
  KVSHARD_TRY(check_batches(job.batches, "batches", job.stamp.payload_bytes));
  if (pull) KVSHARD_TRY(check_batches(job.sources, "sources", job.stamp.payload_bytes));
  return {};
}

}  // namespace

Status JobQueue::push(const CopyJob& job, CopyListener& listener) {
  KVSHARD_TRY(check_job(job));
  std::size_t buffers = 0;
  std::size_t offsets = 0;
  for (const auto& batches : {job.batches, job.sources}) {
    most_batches_ = std::max(most_batches_, batches.size());
    for (const FragmentBatch& batch : batches) {
      buffers += batch.buffers.size();
      offsets += batch.offsets.size();
    }
  }
  most_buffers_ = std::max(most_buffers_, buffers);
  most_offsets_ = std::max(most_offsets_, offsets);

  QueuedJob* const queued = acquire();
  queued->direction = job.direction;
  queued->slot = job.slot;
  queued->stamp = job.stamp;
  queued->checksum = job.checksum;
  queued->after = job.after;
  queued->listener = &listener;
  std::uint64_t bits = 16;
  const auto append = [&](std::span<const FragmentBatch> batches, std::vector<QueuedBatch>& to) {
    std::uint64_t payload_offset = 0;
    for (const FragmentBatch& batch : batches) {
      const std::uint64_t bytes = batch.bytes();
      if (bytes == 0) continue;
      const std::size_t first_buffer = queued->buffers.size();
      const std::size_t first_offset = queued->offsets.size();
      queued->buffers.insert(queued->buffers.end(), batch.buffers.begin(), batch.buffers.end());
      queued->offsets.insert(queued->offsets.end(), batch.offsets.begin(), batch.offsets.end());
      to.push_back({std::span{queued->buffers}.subspan(first_buffer),
                    std::span{queued->offsets}.subspan(first_offset), merge_rows(batch.shape),
                    payload_offset, bytes});
      bits |= placement_bits(to.back());
      payload_offset += bytes;
    }
  };
  append(job.batches, queued->batches);
  append(job.sources, queued->sources);
  queued->alignment = bits & (~bits + 1);
  (last_ == nullptr ? first_ : last_->next) = queued;
  last_ = queued;
  return {};
}

QueuedJob* JobQueue::pop() noexcept {
  QueuedJob* const job = first_;
  if (job == nullptr) return nullptr;
  first_ = job->next;
  if (first_ == nullptr) last_ = nullptr;
  job->next = nullptr;
  return job;
}

void JobQueue::recycle(QueuedJob* job) noexcept {
  job->batches.clear();
  job->sources.clear();
  job->buffers.clear();
  job->offsets.clear();
  job->next = free_;
  free_ = job;
}

QueuedJob* JobQueue::acquire() {
  if (free_ == nullptr) recycle(records_.emplace_back(std::make_unique<QueuedJob>()).get());
  free_->batches.reserve(most_batches_);
  free_->sources.reserve(most_batches_);
  free_->buffers.reserve(most_buffers_);
  free_->offsets.reserve(most_offsets_);
  QueuedJob* const job = free_;
  free_ = job->next;
  job->next = nullptr;
  return job;
}

}  // namespace kvshard
