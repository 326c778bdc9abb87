#include "session/pool_view.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "kvshard/limits.hpp"

namespace kvshard {

PoolView::PoolView(TransferPlan plan, Side side, const Pool& pool)
    : plan_{std::move(plan)}, side_{side} {
  for (const TransferPlan::LaneBuffers& lane : plan_.lanes()) {
    const TransferPlan::LaneSide& own = lane.side(side);
    const auto& buffers = pool.buffers[lane.lane.group];
    for (std::uint32_t b = 0; b < lane.buffer_count; ++b)
      buffers_.push_back(buffers[own.first_pool_buffer + b] + own.offset);
  }
}

std::uint64_t PoolView::payload_bytes(const TransferPlan::Table& table,
                                      const Piece& piece) const noexcept {
  if (piece.partial) {
    return plan_.token_bytes(piece.first_buffer, piece.buffer_count) *
           (table.tokens.unit_tokens() - piece.skip);
  }
  return plan_.unit_bytes(piece.first_buffer, piece.buffer_count) * piece.unit_count;
}

void PoolView::select(const UnitList& units, const Piece& piece, std::span<const LocalPage> pages,
                      std::uint64_t first_page, Selection& out) const {
  out.batches.clear();
  const std::uint32_t end_buffer = piece.first_buffer + piece.buffer_count;
  const auto touches = [&](const TransferPlan::LaneBuffers& lane) {
    return lane.first_buffer < end_buffer &&
           lane.first_buffer + lane.buffer_count > piece.first_buffer;
  };
  const auto lanes = plan_.lanes();
  const std::size_t count = piece.partial ? units.unit_tokens() - piece.skip : piece.unit_count;
  // The spans of the batches point into it.
  out.offsets.resize(count * static_cast<std::size_t>(std::ranges::count_if(lanes, touches)));
  std::span<std::uint64_t> left{out.offsets};
  for (const TransferPlan::LaneBuffers& lane : lanes) {
    if (!touches(lane)) continue;
    const TransferPlan::LaneSide& own = lane.side(side_);
    const std::span<std::uint64_t> offsets = left.first(count);
    left = left.subspan(count);
    if (piece.partial) {
      units.token_offsets(side_, piece.first_unit, piece.skip, pages, first_page, own.page_stride,
                          own.token_stride, offsets);
    } else {
      units.offsets(side_, piece.first_unit, pages, first_page, own.page_stride, own.token_stride,
                    offsets);
    }
    const std::uint32_t begin = std::max(piece.first_buffer, lane.first_buffer);
    const std::uint32_t end = std::min(end_buffer, lane.first_buffer + lane.buffer_count);
    out.batches.push_back({.buffers = std::span{buffers_}.subspan(begin, end - begin),
                           .offsets = offsets,
                           .shape = piece.partial ? own.token : own.unit});
  }
}

Piece PieceCutter::piece(std::uint32_t units, std::uint32_t first_buffer,
                         std::uint32_t buffer_count) const noexcept {
  return {.first_unit = unit_,
          .unit_count = units,
          .partial = skip_.has_value(),
          .skip = skip_.value_or(0),
          .first_buffer = first_buffer,
          .buffer_count = buffer_count};
}

Piece PieceCutter::next(const PoolView& view, const TransferPlan::Table& table,
                        std::uint64_t capacity) noexcept {
  KVSHARD_ASSERT(!done());
  const std::uint64_t whole =
      view.payload_bytes(table, piece(1, first_buffer_, end_buffer_ - first_buffer_));
  if (whole <= capacity) {
    const auto fit = static_cast<std::uint32_t>(
        std::min<std::uint64_t>({end_unit_ - unit_, capacity / whole, ProtocolLimits::kPages}));
    const Piece made = piece(fit, first_buffer_, end_buffer_ - first_buffer_);
    unit_ += fit;
    return made;
  }
  std::uint32_t count = 1;
  while (buffer_ + count < end_buffer_ &&
         view.payload_bytes(table, piece(1, buffer_, count + 1)) <= capacity)
    ++count;
  const Piece made = piece(1, buffer_, count);
  buffer_ += count;
  if (buffer_ == end_buffer_) {
    buffer_ = first_buffer_;
    ++unit_;
  }
  return made;
}

Coverage::Coverage(UnitList::Range range, std::uint32_t first_buffer, std::uint32_t buffers)
    : first_row_{range.first - (range.skip ? 1 : 0)},
      rows_{range.end - first_row_},
      partial_{range.skip.has_value()},
      first_buffer_{first_buffer},
      buffers_{buffers},
      words_{(buffers + 63) / 64},
      bits_(rows_ * words_),
      end_marked_{first_row_} {}

bool Coverage::holds(const Piece& piece) const noexcept {
  if (piece.unit_count == 0 || piece.buffer_count == 0 || piece.first_buffer < first_buffer_ ||
      piece.first_buffer - first_buffer_ >= buffers_ ||
      piece.buffer_count > buffers_ - (piece.first_buffer - first_buffer_) ||
      piece.first_unit < first_row_ || piece.first_unit - first_row_ >= rows_ ||
      piece.unit_count > rows_ - (piece.first_unit - first_row_))
    return false;
  // The partial unit travels as such, and alone.
  const bool on_partial = partial_ && piece.first_unit == first_row_;
  return piece.partial == on_partial && (!on_partial || piece.unit_count == 1);
}

namespace {
// Bits [first, end) of word `word` of a bit row.
std::uint64_t row_mask(std::uint32_t word, std::uint32_t first, std::uint32_t end) noexcept {
  const std::uint32_t low = std::max(first, word * 64) - word * 64;
  const std::uint32_t high = std::min(end, word * 64 + 64) - word * 64;  // 1..64
  return (~std::uint64_t{0} >> (64 - (high - low))) << low;
}
}  // namespace

bool Coverage::mark(const Piece& piece) noexcept {
  KVSHARD_ASSERT(holds(piece));
  const std::uint32_t first = piece.first_buffer - first_buffer_;
  const std::uint32_t end = first + piece.buffer_count;
  for (std::uint64_t row = piece.first_unit - first_row_, left = piece.unit_count; left > 0;
       ++row, --left) {
    std::uint64_t* const bits = bits_.data() + row * words_;
    for (std::uint32_t word = first / 64; word * 64 < end; ++word) {
      const std::uint64_t mask = row_mask(word, first, end);
      if ((bits[word] & mask) != 0) return false;
      bits[word] |= mask;
    }
  }
  marked_ += std::uint64_t{piece.unit_count} * piece.buffer_count;
  end_marked_ = std::max(end_marked_, piece.first_unit + piece.unit_count);
  return true;
}

}  // namespace kvshard
