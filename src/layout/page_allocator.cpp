#include "kvshard/page_allocator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "base/assert.hpp"
#include "base/try.hpp"

namespace kvshard {
namespace {

constexpr std::uint64_t kMaxPages = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kWordBits = 64;

constexpr std::uint32_t words_for(std::uint32_t bits) noexcept {
  return bits / kWordBits + (bits % kWordBits != 0 ? 1 : 0);
}

// Long segments are drawn and freed in blocks that stay in the first-level cache while each owner
// in turn fills, or empties, every shard_size-th place.
constexpr std::size_t block_pages(std::size_t shard_size) noexcept {
  return std::max<std::size_t>(1, 2048 / shard_size) * shard_size;
}

// The owner with most free pages; of equals, the lowest rank.
std::uint32_t fullest(std::span<const std::uint32_t> free) noexcept {
  return static_cast<std::uint32_t>(std::max_element(free.begin(), free.end()) - free.begin());
}

// A snapshot is 32-bit little-endian words: magic, version, shard_size, page_size, pages_per_rank,
// order, whether a group is open, how many pages it has; per rank how many pages are free; the free
// pages of each rank in the order in which they would be drawn; the pages of the group.
constexpr std::uint32_t kSnapshotMagic = 0x4150564b;  // "KVPA"
constexpr std::uint32_t kSnapshotVersion = 1;
constexpr std::size_t kSnapshotHeaderWords = 8;

class WordWriter {
 public:
  explicit WordWriter(std::size_t words) { bytes_.reserve(words * 4); }
  void put(std::uint32_t word) {
    for (int shift = 0; shift < 32; shift += 8)
      bytes_.push_back(static_cast<std::byte>(word >> shift & 0xff));
  }
  [[nodiscard]] std::vector<std::byte> take() && { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class WordReader {
 public:
  explicit WordReader(std::span<const std::byte> bytes) noexcept : bytes_{bytes} {}
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() / 4; }
  std::uint32_t get() noexcept {
    KVSHARD_ASSERT(left() > 0);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < 4; ++i)
      word |= std::to_integer<std::uint32_t>(bytes_[i]) << (8 * i);
    bytes_ = bytes_.subspan(4);
    return word;
  }

 private:
  std::span<const std::byte> bytes_;
};

Error not_a_snapshot(std::string why) {
  return {ErrorCode::invalid_argument, "not an allocator snapshot: " + std::move(why)};
}

Status expect_equal(const char* field, std::uint32_t here, std::uint32_t there) {
  if (here == there) return {};
  return Error{ErrorCode::failed_precondition,
               fmt::format("{} is {} here, {} in the snapshot", field, here, there)};
}

}  // namespace

PageAllocator::PageAllocator(const PageLayout& layout, std::uint32_t pages_per_rank,
                             FreeOrder order)
    : layout_{layout},
      pages_per_rank_{pages_per_rank},
      order_{order},
      free_(layout.shard_size(), pages_per_rank),
      state_(std::size_t{layout.shard_size()} * (std::size_t{pages_per_rank} + 1), PageState::free),
      left_(layout.shard_size()) {
  group_.reserve(total_pages());
  const auto shard_size = layout.shard_size();
  if (order == FreeOrder::last_freed_first) {
    lists_.resize(total_pages());
    for (std::uint32_t rank = 0; rank < shard_size; ++rank)
      for (std::uint32_t i = 0; i < pages_per_rank; ++i)
        lists_[std::size_t{rank} * pages_per_rank + i] =
            layout.logical(rank, LocalPage{pages_per_rank - i});
    return;
  }
  const auto words = words_for(pages_per_rank);
  bits_.resize(std::size_t{shard_size} * words);
  filled_.resize(std::size_t{shard_size} * words_for(words));
  std::fill(free_.begin(), free_.end(), 0);
  for (std::uint32_t rank = 0; rank < shard_size; ++rank)
    for (std::uint32_t local = 1; local <= pages_per_rank; ++local) {
      const auto page = layout.logical(rank, LocalPage{local});
      give(rank, 1, &page, 1);
    }
}

Result<PageAllocator> PageAllocator::create(const PageLayout& layout, std::uint32_t pages_per_rank,
                                            FreeOrder order) {
  if (pages_per_rank == 0) return Error{ErrorCode::invalid_argument, "pages_per_rank is 0"};
  if ((std::uint64_t{pages_per_rank} + 1) * layout.shard_size() > kMaxPages)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("shard_size {} times {} pages per rank exceeds 32-bit page numbers",
                             layout.shard_size(), std::uint64_t{pages_per_rank} + 1)};
  return PageAllocator{layout, pages_per_rank, order};
}

// ---- drawing

Result<std::uint32_t> PageAllocator::draw_chain(std::span<LogicalPage> pages) {
  const auto base = fullest(free_);
  KVSHARD_TRY(extend(base, Position{0}, pages));
  return base;
}

Status PageAllocator::extend(std::uint32_t base, Position first, std::span<LogicalPage> pages) {
  const DrawSegment segment{base, first, pages};
  return draw({&segment, 1});
}

Status PageAllocator::draw(std::span<const DrawSegment> segments) {
  KVSHARD_TRY(check_draw(segments));
  const auto shard_size = layout_.shard_size();
  for (const auto& segment : segments) {
    // The bases that check_draw() chose: it counted down from the same numbers.
    const auto base = segment.base ? *segment.base : fullest(free_);
    const auto start = layout_.owner_after(base, index(segment.first));
    const auto block = block_pages(shard_size);
    for (std::size_t at = 0; at < segment.pages.size(); at += block) {
      const auto pages = segment.pages.subspan(at, std::min(block, segment.pages.size() - at));
      for (std::uint32_t offset = 0; offset < shard_size && offset < pages.size(); ++offset)
        take(layout_.owner_after(start, offset), layout_.share(pages.size(), offset),
             pages.data() + offset, shard_size);
    }
  }
  return {};
}

Status PageAllocator::check_draw(std::span<const DrawSegment> segments) {
  const auto shard_size = layout_.shard_size();
  std::copy(free_.begin(), free_.end(), left_.begin());
  for (const auto& segment : segments) {
    if (segment.base && *segment.base >= shard_size)
      return Error{ErrorCode::invalid_argument,
                   fmt::format("base {} is not below shard_size {}", *segment.base, shard_size)};
    if (!segment.base && index(segment.first) != 0)
      return Error{ErrorCode::invalid_argument,
                   fmt::format("a new chain starts at position 0, not {}", index(segment.first))};
    const auto base = segment.base ? *segment.base : fullest(left_);
    for (std::uint32_t offset = 0; offset < shard_size && offset < segment.pages.size(); ++offset) {
      const auto rank = layout_.owner_after(base, std::uint64_t{index(segment.first)} + offset);
      const auto needed = layout_.share(segment.pages.size(), offset);
      if (needed > left_[rank]) return short_of(rank, needed + (free_[rank] - left_[rank]));
      left_[rank] -= static_cast<std::uint32_t>(needed);
    }
  }
  return {};
}

Status PageAllocator::draw_matching(std::span<const LogicalPage> like,
                                    std::span<LogicalPage> pages) {
  if (like.size() != pages.size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} pages to match, room for {}", like.size(), pages.size())};
  std::fill(left_.begin(), left_.end(), 0);
  for (std::size_t k = 0; k < like.size(); ++k) {
    if (layout_.is_padding(like[k])) return refuse_page(like[k], k);
    ++left_[layout_.owner(like[k])];
  }
  for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank)
    if (left_[rank] > free_[rank]) return short_of(rank, left_[rank]);
  for (std::size_t k = 0; k < like.size(); ++k) take(layout_.owner(like[k]), 1, &pages[k], 1);
  return {};
}

Status PageAllocator::short_of(std::uint32_t rank, std::uint64_t needed) const {
  return Error{
      ErrorCode::resource_exhausted,
      fmt::format("rank {} has {} free pages, the draw needs {}", rank, free_[rank], needed)};
}

// Moves `count` pages of a rank's list to to[0], to[step], ... The caller has checked that it has
// them.
void PageAllocator::take(std::uint32_t rank, std::uint64_t count, LogicalPage* to,
                         std::size_t step) noexcept {
  KVSHARD_ASSERT(count <= free_[rank]);
  if (order_ == FreeOrder::last_freed_first) {
    const auto* const top = lists_.data() + std::size_t{rank} * pages_per_rank_ + free_[rank];
    auto* const state = state_.data();
    for (std::size_t i = 0; i < count; ++i) {
      const auto page = *(top - 1 - i);
      state[index(page)] = PageState::used;
      to[i * step] = page;
    }
    free_[rank] -= static_cast<std::uint32_t>(count);
    return;
  }
  free_[rank] -= static_cast<std::uint32_t>(count);
  const auto words = words_for(pages_per_rank_);
  auto* const bits = bits_.data() + std::size_t{rank} * words;
  auto* const filled = filled_.data() + std::size_t{rank} * words_for(words);
  for (std::uint32_t group = 0; count > 0; ++group) {
    while (filled[group] != 0 && count > 0) {
      const auto word =
          group * kWordBits + static_cast<std::uint32_t>(std::countr_zero(filled[group]));
      for (; bits[word] != 0 && count > 0; --count, to += step) {
        const auto bit = static_cast<std::uint32_t>(std::countr_zero(bits[word]));
        bits[word] &= bits[word] - 1;
        *to = layout_.logical(rank, LocalPage{word * kWordBits + bit + 1});
        state_[index(*to)] = PageState::used;
      }
      if (bits[word] == 0) filled[group] &= filled[group] - 1;
    }
  }
}

// ---- freeing

Status PageAllocator::free_chain(std::span<const LogicalPage> pages) {
  const FreeSegment segment{pages.empty() ? 0 : layout_.owner(pages[0]), Position{0}, pages};
  return free({&segment, 1});
}

Status PageAllocator::free(std::span<const FreeSegment> segments) {
  // Marking while checking finds a page that stands twice in the call, too.
  const auto freed = group_open_ ? PageState::grouped : PageState::free;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto& segment = segments[s];
    const auto marked = mark(segment.pages, PageState::used, freed);
    if (marked == segment.pages.size() && check_segment(segment)) continue;
    mark(segment.pages.first(marked), freed, PageState::used);
    for (const auto& before : segments.first(s)) mark(before.pages, freed, PageState::used);
    if (marked == segment.pages.size()) return check_segment(segment);
    return refuse_page(segment.pages[marked], std::uint64_t{index(segment.first)} + marked);
  }
  const auto shard_size = layout_.shard_size();
  for (const auto& segment : segments) {
    if (group_open_) {
      group_.insert(group_.end(), segment.pages.begin(), segment.pages.end());
      continue;
    }
    // Last page first, so that the chain is drawn again in its order.
    const auto start = layout_.owner_after(segment.base, index(segment.first));
    const auto block = block_pages(shard_size);
    for (auto at = (segment.pages.size() + block - 1) / block * block; at > 0;) {
      at -= block;
      const auto pages = segment.pages.subspan(at, std::min(block, segment.pages.size() - at));
      for (std::uint32_t offset = 0; offset < shard_size && offset < pages.size(); ++offset)
        give(layout_.owner_after(start, offset), layout_.share(pages.size(), offset),
             pages.data() + offset, shard_size);
    }
  }
  return {};
}

Status PageAllocator::begin_free_group() {
  if (group_open_)
    return Error{ErrorCode::failed_precondition,
                 fmt::format("a free group of {} pages is open", group_.size())};
  group_open_ = true;
  return {};
}

Status PageAllocator::end_free_group() {
  if (!group_open_) return Error{ErrorCode::failed_precondition, "no free group is open"};
  for (std::size_t k = group_.size(); k-- > 0;) {
    state_[index(group_[k])] = PageState::free;
    give(layout_.owner(group_[k]), 1, &group_[k], 1);
  }
  group_.clear();
  group_open_ = false;
  return {};
}

// Marks pages up to the first that is out of range or not in state `from`; returns how many it
// marked.
std::size_t PageAllocator::mark(std::span<const LogicalPage> pages, PageState from,
                                PageState to) noexcept {
  const std::span state{state_};  // not reloaded after each store
  std::size_t k = 0;
  for (; k < pages.size(); ++k) {
    const auto page = index(pages[k]);
    if (page >= state.size() || state[page] != from) break;
    state[page] = to;
  }
  return k;
}

Status PageAllocator::check_segment(const FreeSegment& segment) const {
  if (segment.base >= layout_.shard_size())
    return Error{ErrorCode::invalid_argument, fmt::format("base {} is not below shard_size {}",
                                                          segment.base, layout_.shard_size())};
  if (segment.pages.empty()) return {};
  const auto owner = layout_.owner(segment.pages[0]);
  const auto expected = layout_.owner_after(segment.base, index(segment.first));
  if (owner != expected)
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("owners are not cyclic: page {} at position {} belongs to rank {}, a chain "
                    "of base {} has rank {} there",
                    index(segment.pages[0]), index(segment.first), owner, segment.base, expected)};
  return layout_.check_cyclic(segment.pages, segment.first);
}

// Says why a page cannot be freed (or matched).
Status PageAllocator::refuse_page(LogicalPage page, std::uint64_t position) const {
  const auto what = fmt::format("page {} at position {}", index(page), position);
  if (layout_.is_padding(page))
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} is padding: pages below {} are never handed out", what,
                             layout_.shard_size())};
  if (index(page) >= state_.size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} is out of range: pages end at {}", what, state_.size())};
  switch (state_[index(page)]) {
    case PageState::free:
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("{} is not allocated: freed before, or a page of another pool", what)};
    case PageState::grouped:
      return Error{ErrorCode::invalid_argument,
                   fmt::format("{} is in the open free group already", what)};
    case PageState::used:
      break;
  }
  return Error{ErrorCode::invalid_argument, fmt::format("{} stands twice in one free", what)};
}

// Adds from[0], from[step], ... to a rank's list, so that they are drawn again in this order.
void PageAllocator::give(std::uint32_t rank, std::uint64_t count, const LogicalPage* from,
                         std::size_t step) noexcept {
  if (order_ == FreeOrder::last_freed_first) {
    auto* const top = lists_.data() + std::size_t{rank} * pages_per_rank_ + free_[rank];
    for (std::size_t i = 0; i < count; ++i) top[count - 1 - i] = from[i * step];
  } else {
    const auto words = words_for(pages_per_rank_);
    auto* const bits = bits_.data() + std::size_t{rank} * words;
    auto* const filled = filled_.data() + std::size_t{rank} * words_for(words);
    for (std::size_t i = 0; i < count; ++i) {
      const auto bit = layout_.divisor().quotient(index(from[i * step]) - rank) - 1;
      const auto word = bit / kWordBits;
      bits[word] |= std::uint64_t{1} << (bit % kWordBits);
      filled[word / kWordBits] |= std::uint64_t{1} << (word % kWordBits);
    }
  }
  free_[rank] += static_cast<std::uint32_t>(count);
}

// ---- admission and accounting

std::uint64_t PageAllocator::admissible_pages() const noexcept {
  return std::uint64_t{layout_.shard_size()} * *std::min_element(free_.begin(), free_.end());
}

std::uint64_t PageAllocator::admissible_tokens() const noexcept {
  return admissible_pages() * layout_.page_size();
}

Status PageAllocator::admit(std::uint64_t pages) const {
  if (pages <= kMaxPages && charge_pages(pages) <= admissible_pages()) return {};
  const auto rank = std::min_element(free_.begin(), free_.end()) - free_.begin();
  return Error{
      ErrorCode::resource_exhausted,
      fmt::format("{} pages are charged as {} more, {} are admissible: rank {} has {} free", pages,
                  layout_.shard_size(), admissible_pages(), rank,
                  free_[static_cast<std::size_t>(rank)])};
}

std::uint32_t PageAllocator::free_pages(std::uint32_t rank) const noexcept {
  return rank < free_.size() ? free_[rank] : 0;
}

std::uint64_t PageAllocator::total_free_pages() const noexcept {
  return std::accumulate(free_.begin(), free_.end(), std::uint64_t{0});
}

std::uint64_t PageAllocator::used_pages() const noexcept {
  return total_pages() - total_free_pages() - grouped_pages();
}

// ---- replicas

std::vector<std::byte> PageAllocator::snapshot() const {
  WordWriter out{kSnapshotHeaderWords + free_.size() + total_free_pages() + group_.size()};
  for (const auto word :
       {kSnapshotMagic, kSnapshotVersion, layout_.shard_size(), layout_.page_size(),
        pages_per_rank_, std::uint32_t{static_cast<std::uint8_t>(order_)},
        std::uint32_t{group_open_}, static_cast<std::uint32_t>(group_.size())})
    out.put(word);
  for (const auto count : free_) out.put(count);
  for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank) {
    if (order_ == FreeOrder::last_freed_first) {
      const auto* const list = lists_.data() + std::size_t{rank} * pages_per_rank_;
      for (std::size_t i = free_[rank]; i-- > 0;) out.put(index(list[i]));
    } else {
      const auto words = words_for(pages_per_rank_);
      for (std::uint32_t word = 0; word < words; ++word)
        for (auto bits = bits_[std::size_t{rank} * words + word]; bits != 0; bits &= bits - 1) {
          const auto bit = static_cast<std::uint32_t>(std::countr_zero(bits));
          out.put(index(layout_.logical(rank, LocalPage{word * kWordBits + bit + 1})));
        }
    }
  }
  for (const auto page : group_) out.put(index(page));
  return std::move(out).take();
}

Status PageAllocator::restore(std::span<const std::byte> snapshot) {
  if (snapshot.size() % 4 != 0 || snapshot.size() / 4 < kSnapshotHeaderWords)
    return not_a_snapshot(fmt::format("{} bytes", snapshot.size()));
  WordReader in{snapshot};
  if (const auto magic = in.get(); magic != kSnapshotMagic)
    return not_a_snapshot(fmt::format("magic {:#x}", magic));
  KVSHARD_TRY(expect_equal("snapshot version", kSnapshotVersion, in.get()));
  KVSHARD_TRY(expect_equal("shard_size", layout_.shard_size(), in.get()));
  KVSHARD_TRY(expect_equal("page_size", layout_.page_size(), in.get()));
  KVSHARD_TRY(expect_equal("pages_per_rank", pages_per_rank_, in.get()));
  KVSHARD_TRY(expect_equal("order", static_cast<std::uint32_t>(order_), in.get()));
  const auto group_open = in.get();
  const auto grouped = in.get();
  if (group_open > 1 || (group_open == 0 && grouped != 0))
    return not_a_snapshot(fmt::format("group flag {} with {} pages", group_open, grouped));

  if (in.left() < free_.size()) return not_a_snapshot(fmt::format("{} bytes", snapshot.size()));
  std::vector<std::uint32_t> counts(free_.size());
  std::uint64_t pages = grouped;
  for (auto& count : counts) {
    count = in.get();
    pages += count;
  }
  if (pages != in.left())
    return not_a_snapshot(fmt::format("{} pages declared, {} present", pages, in.left()));

  // Into a fresh state with every page used, so that an error leaves this one as it is.
  PageAllocator fresh{layout_, pages_per_rank_, order_};
  std::vector<LogicalPage> list(pages_per_rank_);
  for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank)
    fresh.take(rank, pages_per_rank_, list.data(), 1);
  const auto read = [&](PageState state) -> Result<LogicalPage> {
    const LogicalPage page{in.get()};
    if (fresh.mark({&page, 1}, PageState::used, state) == 1) return page;
    return not_a_snapshot(fmt::format("page {} is listed twice, or is none of ours", index(page)));
  };
  for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank) {
    if (counts[rank] > pages_per_rank_)
      return not_a_snapshot(fmt::format("rank {} has {} free pages", rank, counts[rank]));
    for (std::uint32_t i = 0; i < counts[rank]; ++i) {
      KVSHARD_TRY(list[i], read(PageState::free));
      if (layout_.owner(list[i]) != rank)
        return not_a_snapshot(fmt::format("page {} is listed for rank {}", index(list[i]), rank));
    }
    fresh.give(rank, counts[rank], list.data(), 1);
  }
  for (std::uint32_t i = 0; i < grouped; ++i) {
    KVSHARD_TRY(const auto page, read(PageState::grouped));
    fresh.group_.push_back(page);
  }
  fresh.group_open_ = group_open == 1;
  *this = std::move(fresh);
  return {};
}

}  // namespace kvshard
