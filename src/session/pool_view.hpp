#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvshard/copy_engine.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/plan.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// Units of one table in some of the plan's buffers: what one slot holds.
struct Piece {
  std::uint64_t first_unit{0};
  std::uint32_t unit_count{0};
  bool partial{false};  ///< one unit, and of it only the tokens from `skip` on
  std::uint32_t skip{0};
  std::uint32_t first_buffer{0};
  std::uint32_t buffer_count{0};
};

/// A rank's pool as the plan with one peer numbers it.
///
/// Owns:    the plan, and copies of pointers; not the memory.
/// Threads: thread-compatible.
class PoolView {
 public:
  /// `pool` has the geometry of the plan's `side`.
  PoolView(TransferPlan plan, Side side, const Pool& pool);

  [[nodiscard]] const TransferPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::uint64_t payload_bytes(const TransferPlan::Table& table,
                                            const Piece& piece) const noexcept;

  /// What a copy job needs; reused, so that a warm selection allocates nothing.
  struct Selection {
    std::vector<std::uint64_t> offsets;
    std::vector<FragmentBatch> batches;
  };
  /// The piece's fragments, in slot order. `pages` are this rank's pages of the request from number
  /// first_page on.
  void select(const UnitList& units, const Piece& piece, std::span<const LocalPage> pages,
              std::uint64_t first_page, Selection& out) const;

 private:
  TransferPlan plan_;
  Side side_;
  std::vector<std::byte*> buffers_;  // moved on to the lane's first head
};

/// Cuts units over a range of buffers into pieces of at most `capacity` payload bytes: whole units where
/// one fits over all its buffers, else one unit's buffers in several pieces. Each (unit, buffer) is in
/// exactly one piece.
///
/// Requires: capacity >= the largest unit of one buffer, so that it always gets on.
class PieceCutter {
 public:
  /// Units [first, end). With `skip`, of the one unit only its tokens from there on.
  PieceCutter(std::uint64_t first, std::uint64_t end, std::optional<std::uint32_t> skip,
              std::uint32_t first_buffer, std::uint32_t buffer_count) noexcept
      : unit_{first},
        end_unit_{end},
        skip_{skip},
        first_buffer_{first_buffer},
        end_buffer_{first_buffer + buffer_count},
        buffer_{first_buffer} {}

  [[nodiscard]] bool done() const noexcept {
    return unit_ >= end_unit_ || first_buffer_ == end_buffer_;
  }
  Piece next(const PoolView& view, const TransferPlan::Table& table,
             std::uint64_t capacity) noexcept;

 private:
  [[nodiscard]] Piece piece(std::uint32_t units, std::uint32_t first_buffer,
                            std::uint32_t buffer_count) const noexcept;

  std::uint64_t unit_, end_unit_;
  std::optional<std::uint32_t> skip_;
  std::uint32_t first_buffer_, end_buffer_;
  std::uint32_t buffer_;  // where the next piece starts
};

/// Which (unit, buffer) pairs of a pull have arrived from one rank: each must, once.
class Coverage {
 public:
  /// Units [first, end) in `buffers` buffers from number `first_buffer` on; before them, with `partial`,
  /// the rest of unit first - 1.
  Coverage(UnitList::Range range, std::uint32_t first_buffer, std::uint32_t buffers);

  [[nodiscard]] bool holds(const Piece& piece) const noexcept;
  /// False when any of the pairs was there before. Requires holds().
  bool mark(const Piece& piece) noexcept;
  /// Whether all pairs of the units before `end_unit` have arrived, and none of later ones.
  [[nodiscard]] bool complete(std::uint64_t end_unit) const noexcept {
    return marked_ == expected(end_unit) && (marked_ == 0 || end_marked_ <= end_unit);
  }
  [[nodiscard]] std::uint64_t expected(std::uint64_t end_unit) const noexcept {
    return end_unit > first_row_ ? (end_unit - first_row_) * buffers_ : 0;
  }
  [[nodiscard]] std::uint64_t marked() const noexcept { return marked_; }

 private:
  std::uint64_t first_row_;  // unit number of row 0
  std::uint64_t rows_;
  bool partial_;  // row 0 is a partial unit
  std::uint32_t first_buffer_, buffers_, words_;
  std::vector<std::uint64_t> bits_;
  std::uint64_t marked_{0};
  std::uint64_t end_marked_{0};  // behind the last unit that was marked
};

}  // namespace kvshard
