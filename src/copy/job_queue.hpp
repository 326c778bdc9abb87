#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvshard/copy_engine.hpp"

namespace kvshard {

/// One FragmentBatch of a queued job, not empty, with rows that touch merged into one.
struct QueuedBatch {
  std::span<std::byte* const> buffers;
  std::span<const std::uint64_t> offsets;
  FragmentShape shape;
  std::uint64_t payload_offset{0};  ///< where its first byte stands in the payload
  std::uint64_t bytes{0};
};

/// A job with its own copy of what CopyJob borrows.
struct QueuedJob {
  CopyJob::Direction direction{CopyJob::Direction::gather};
  std::byte* slot{nullptr};
  SlotStamp stamp;
  bool checksum{false};
  EventHandle after{nullptr};
  CopyListener* listener{nullptr};
  std::uint64_t alignment{
      16};  ///< 16 or less: the power of two that divides every address and size
  std::vector<QueuedBatch> batches;  ///< their spans point into the two vectors below
  std::vector<QueuedBatch> sources;  ///< likewise; of a pull
  std::vector<std::byte*> buffers;
  std::vector<std::uint64_t> offsets;
  QueuedJob* next{nullptr};
};

/// The jobs that an engine took and has not started, first in first out; and the store of job
/// records.
///
/// Owns:    every record it ever made, so that a warm queue does not allocate: records are used again last
///          in first out, and each is made large enough for the largest job seen.
/// Threads: thread-compatible.
/// Errors:  push() gives invalid_argument for batches or sources that do not add up to the stamp's
///          payload_bytes, a null buffer, a slot that is null or not 16-byte aligned; for a pull with a
///          slot or a checksum, and any other job with sources.
class JobQueue {
 public:
  /// Copies the job's spans.
  Status push(const CopyJob& job, CopyListener& listener);
  /// The oldest job, which the caller gives back with recycle(); null when there is none.
  [[nodiscard]] QueuedJob* pop() noexcept;
  [[nodiscard]] const QueuedJob* front() const noexcept { return first_; }
  void recycle(QueuedJob* job) noexcept;

 private:
  [[nodiscard]] QueuedJob* acquire();

  std::vector<std::unique_ptr<QueuedJob>> records_;
  QueuedJob* free_{nullptr};
  QueuedJob* first_{nullptr};
  QueuedJob* last_{nullptr};
  std::size_t most_batches_{0};
  std::size_t most_buffers_{0};
  std::size_t most_offsets_{0};
};

/// Calls piece(pool, payload_offset, bytes) for the bytes [begin, end) of a batch's part of the
/// payload, in order, with neighbours in the pool (rows, pages, buffers) joined into one piece.
template <typename Piece>
void for_each_piece(const QueuedBatch& batch, std::uint64_t begin, std::uint64_t end,
                    Piece&& piece) {
  const FragmentShape& shape = batch.shape;
  const std::uint64_t fragment = begin / shape.bytes();
  const std::uint64_t row = begin % shape.bytes() / shape.row_bytes;
  std::uint64_t column = begin % shape.row_bytes;
  std::uint64_t inner = row % shape.inner;
  std::uint64_t outer = row / shape.inner;
  std::size_t page = fragment % batch.offsets.size();
  std::size_t buffer = fragment / batch.offsets.size();

  std::byte* run = nullptr;
  std::uint64_t run_begin = begin;
  std::uint64_t at = begin;
  while (at < end) {
    std::byte* const row_begin = batch.buffers[buffer] + batch.offsets[page] +
                                 outer * shape.outer_stride + inner * shape.inner_stride + column;
    if (run == nullptr || run + (at - run_begin) != row_begin) {
      if (run != nullptr) piece(run, batch.payload_offset + run_begin, at - run_begin);
      run = row_begin;
      run_begin = at;
    }
    at += std::min(shape.row_bytes - column, end - at);
    column = 0;
    if (++inner < shape.inner) continue;
    inner = 0;
    if (++outer < shape.outer) continue;
    outer = 0;
    if (++page < batch.offsets.size()) continue;
    page = 0;
    ++buffer;
  }
  if (run != nullptr) piece(run, batch.payload_offset + run_begin, at - run_begin);
}

/// The same over batches that follow each other in the payload: calls piece(pool, payload_offset, bytes) for
/// the payload bytes [begin, end), in order.
template <typename Piece>
void for_each_piece(std::span<const QueuedBatch> batches, std::uint64_t begin, std::uint64_t end,
                    Piece&& piece) {
  for (const QueuedBatch& batch : batches) {
    const std::uint64_t first = std::max(begin, batch.payload_offset);
    const std::uint64_t last = std::min(end, batch.payload_offset + batch.bytes);
    if (first < last)
      for_each_piece(batch, first - batch.payload_offset, last - batch.payload_offset, piece);
  }
}

}  // namespace kvshard
