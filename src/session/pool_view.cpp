#include "session/pool_view.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/assert.hpp"

namespace kvshard {

PoolView::PoolView(const Pool& self, const Geometry& prefill, const Geometry& decode) {
  page_count_ = std::numeric_limits<std::uint32_t>::max();
  bytes_before_.push_back(0);
  for (std::size_t g = 0; g < self.geometry.groups.size(); ++g) {
    const BufferGroup& group = self.geometry.groups[g];
    const std::uint64_t packed_stride = group.page_bytes();
    groups_.push_back({.first_buffer = buffers(),
                       .buffer_count = group.buffers(),
                       .buffers_per_layer = group.buffers_per_layer,
                       .layers = group.layers,
                       .page_stride = group.page_stride != 0 ? group.page_stride : packed_stride,
                       .shape = page_shape(group, prefill.groups[g], decode.groups[g])});
    buffers_.insert(buffers_.end(), self.buffers[g].begin(), self.buffers[g].end());
    for (std::uint32_t b = 0; b < group.buffers(); ++b)
      bytes_before_.push_back(bytes_before_.back() + packed_stride);
    page_count_ = std::min(page_count_, group.page_count);
  }
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> PoolView::layer_ranges(
    std::uint32_t first, std::uint32_t count) const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
  for (const Group& group : groups_) {
    const std::uint32_t begin = std::min(first, group.layers);
    const std::uint32_t end = std::min(first + count, group.layers);
    if (begin == end) continue;
    const std::uint32_t first_buffer = group.first_buffer + begin * group.buffers_per_layer;
    const std::uint32_t buffer_count = (end - begin) * group.buffers_per_layer;
    if (!ranges.empty() && ranges.back().first + ranges.back().second == first_buffer) {
      ranges.back().second += buffer_count;  // whole neighbouring groups go together
    } else {
      ranges.emplace_back(first_buffer, buffer_count);
    }
  }
  return ranges;
}

void PoolView::select(std::uint32_t first, std::uint32_t count, std::span<const LocalPage> pages,
                      Selection& out) const {
  out.batches.clear();
  out.offsets.clear();
  out.offsets.reserve(groups_.size() * pages.size());  // the spans below point into it
  for (const Group& group : groups_) {
    const std::uint32_t begin = std::max(first, group.first_buffer);
    const std::uint32_t end = std::min(first + count, group.first_buffer + group.buffer_count);
    if (begin >= end) continue;
    const std::size_t start = out.offsets.size();
    for (const LocalPage page : pages) out.offsets.push_back(index(page) * group.page_stride);
    out.batches.push_back({.buffers = std::span{buffers_}.subspan(begin, end - begin),
                           .offsets = std::span{out.offsets}.subspan(start),
                           .shape = group.shape});
  }
}

Piece PieceCutter::next(const PoolView& view, std::uint64_t capacity) noexcept {
  KVSHARD_ASSERT(!done());
  const std::uint64_t whole = view.page_bytes(first_buffer_, end_buffer_ - first_buffer_);
  if (whole <= capacity) {
    const auto fit =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(end_page_ - page_, capacity / whole));
    const Piece piece{page_, fit, first_buffer_, end_buffer_ - first_buffer_};
    page_ += fit;
    return piece;
  }
  std::uint32_t count = 1;
  while (buffer_ + count < end_buffer_ && view.page_bytes(buffer_, count + 1) <= capacity) ++count;
  const Piece piece{page_, 1, buffer_, count};
  buffer_ += count;
  if (buffer_ == end_buffer_) {
    buffer_ = first_buffer_;
    ++page_;
  }
  return piece;
}

Coverage::Coverage(std::uint32_t positions, std::uint32_t buffers)
    : buffers_{buffers},
      words_{(buffers + 63) / 64},
      bits_(std::size_t{positions} * words_),
      missing_{std::uint64_t{positions} * buffers} {}

namespace {
// Bits [first, end) of word `word` of a bit row.
std::uint64_t row_mask(std::uint32_t word, std::uint32_t first, std::uint32_t end) noexcept {
  const std::uint32_t low = std::max(first, word * 64) - word * 64;
  const std::uint32_t high = std::min(end, word * 64 + 64) - word * 64;  // 1..64
  return (~std::uint64_t{0} >> (64 - (high - low))) << low;
}
}  // namespace

bool Coverage::mark(std::uint32_t position, std::uint32_t first_buffer,
                    std::uint32_t count) noexcept {
  if (count == 0) return true;
  const std::uint32_t end = first_buffer + count;
  std::uint64_t* const row = bits_.data() + std::size_t{position} * words_;
  for (std::uint32_t word = first_buffer / 64; word * 64 < end; ++word) {
    if ((row[word] & row_mask(word, first_buffer, end)) != 0) return false;
  }
  for (std::uint32_t word = first_buffer / 64; word * 64 < end; ++word)
    row[word] |= row_mask(word, first_buffer, end);
  missing_ -= count;
  return true;
}

std::uint32_t Coverage::first_missing() const noexcept {
  for (std::size_t i = 0; i < bits_.size(); ++i) {
    const auto word = static_cast<std::uint32_t>(i % words_);
    if (bits_[i] != row_mask(word, word * 64, std::min(buffers_, word * 64 + 64))) {
      return static_cast<std::uint32_t>(i / words_);
    }
  }
  return 0;
}

}  // namespace kvshard
