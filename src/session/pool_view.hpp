#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvshard/copy_engine.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// A pool as one peer sees it: its buffers numbered through all groups, and how a page of each is read so
/// that a slot means the same on both sides.
///
/// Owns:    copies of pointers and shapes; not the memory.
/// Threads: thread-compatible, but for select(), which reuses `Selection`.
class PoolView {
 public:
  /// `self` is the rank's own pool; `prefill` and `decode` are the two geometries of the session, which
  /// passed check_compatible(); one of them is self's.
  PoolView(const Pool& self, const Geometry& prefill, const Geometry& decode);

  [[nodiscard]] std::uint32_t buffers() const noexcept {
    return static_cast<std::uint32_t>(buffers_.size());
  }
  /// Payload bytes of one page in the buffers [first, first + count).
  [[nodiscard]] std::uint64_t page_bytes(std::uint32_t first, std::uint32_t count) const noexcept {
    return bytes_before_[first + count] - bytes_before_[first];
  }
  /// Smallest page count of all groups: local pages are below it.
  [[nodiscard]] std::uint32_t page_count() const noexcept { return page_count_; }

  /// The buffers of layers [first, first + count) of every group, as buffer ranges (first, count).
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> layer_ranges(
      std::uint32_t first, std::uint32_t count) const;

  /// What a copy job needs; reused, so that a warm selection allocates nothing.
  struct Selection {
    std::vector<std::uint64_t> offsets;
    std::vector<FragmentBatch> batches;
  };
  /// Fragments of `pages` in the buffers [first, first + count), in slot order.
  void select(std::uint32_t first, std::uint32_t count, std::span<const LocalPage> pages,
              Selection& out) const;

 private:
  struct Group {
    std::uint32_t first_buffer;
    std::uint32_t buffer_count;
    std::uint32_t buffers_per_layer;
    std::uint32_t layers;
    std::uint64_t page_stride;
    FragmentShape shape;
  };

  std::vector<Group> groups_;
  std::vector<std::byte*> buffers_;
  std::vector<std::uint64_t> bytes_before_;  // prefix sums of page bytes by buffer
  std::uint32_t page_count_{0};
};

/// A part of a chunk that fits one slot: pages [first_page, +page_count) in buffers [first_buffer, +buffer_count).
struct Piece {
  std::uint32_t first_page{0};
  std::uint32_t page_count{0};
  std::uint32_t first_buffer{0};
  std::uint32_t buffer_count{0};
};

/// Cuts a chunk into pieces of at most `capacity` payload bytes: whole pages where a page fits over all
/// its buffers, else one page's buffers in several pieces. Each (page, buffer) is in exactly one piece.
///
/// Requires: capacity >= the largest page of one buffer, so that it always gets on.
class PieceCutter {
 public:
  /// Pages [first_page, end_page) of a chunk.
  PieceCutter(std::uint32_t first_page, std::uint32_t end_page, std::uint32_t first_buffer,
              std::uint32_t buffer_count) noexcept
      : end_page_{end_page},
        first_buffer_{first_buffer},
        end_buffer_{first_buffer + buffer_count},
        page_{first_page},
        buffer_{first_buffer} {}

  [[nodiscard]] bool done() const noexcept {
    return page_ >= end_page_ || first_buffer_ == end_buffer_;
  }
  Piece next(const PoolView& view, std::uint64_t capacity) noexcept;

 private:
  std::uint32_t end_page_, first_buffer_, end_buffer_;
  std::uint32_t page_, buffer_;  // where the next piece starts
};

/// Which (position, buffer) pairs of a pull have arrived: each must, once.
class Coverage {
 public:
  Coverage(std::uint32_t positions, std::uint32_t buffers);
  /// False, with nothing marked for this position, when any of the pairs was there before.
  bool mark(std::uint32_t position, std::uint32_t first_buffer, std::uint32_t count) noexcept;
  [[nodiscard]] bool complete() const noexcept { return missing_ == 0; }
  [[nodiscard]] std::uint64_t missing() const noexcept { return missing_; }
  /// The first position that lacks a buffer; requires !complete().
  [[nodiscard]] std::uint32_t first_missing() const noexcept;

 private:
  std::uint32_t buffers_;
  std::uint32_t words_;  // per position
  std::vector<std::uint64_t> bits_;
  std::uint64_t missing_;
};

}  // namespace kvshard
