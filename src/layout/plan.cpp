#include "kvshard/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "base/try.hpp"
#include "layout/strides.hpp"

namespace kvshard {
namespace {

constexpr std::uint64_t kMaxCells = 1U << 16;  // of one period of two token patterns

Error differs(std::string message) {
  return Error{ErrorCode::failed_precondition, "geometry differs: " + std::move(message)};
}

// The field that decides a side's stripe, and its value.
std::pair<const char*, std::uint32_t> stripe_field(const BufferGroup& group) noexcept {
  return {group.stripe() == group.page_size ? "page_size" : "interleave", group.stripe()};
}

}  // namespace

// --- Units ---

UnitList::Place UnitList::operator[](std::uint64_t unit) const noexcept {
  const std::uint64_t periods = unit / period_.size();
  Place place = period_[unit % period_.size()];
  place.prefill_page += periods * prefill_pages_;
  place.decode_page += periods * decode_pages_;
  place.first_token += periods * period_tokens_;
  return place;
}

std::uint64_t UnitList::units_before(std::uint64_t token) const noexcept {
  const auto in_period =
      std::ranges::lower_bound(period_, token % period_tokens_, {}, &Place::first_token);
  return token / period_tokens_ * period_.size() +
         static_cast<std::uint64_t>(in_period - period_.begin());
}

UnitList::Range UnitList::range(std::uint64_t first_token, std::uint64_t end_token) const noexcept {
  if (empty()) return {};
  Range range{units_before(first_token), units_before(std::max(first_token, end_token)), {}};
  if (range.first == 0 || first_token >= end_token) return range;
  // How many tokens of the unit before lie below first_token.
  const std::uint64_t distance = first_token - (*this)[range.first - 1].first_token;
  const std::uint64_t below = distance / run_stride_ * run_tokens_ +
                              std::min<std::uint64_t>(distance % run_stride_, run_tokens_);
  if (below < std::uint64_t{runs_} * run_tokens_) range.skip = static_cast<std::uint32_t>(below);
  return range;
}

std::uint64_t UnitList::first_in_prefill_page(std::uint64_t page) const noexcept {
  if (empty()) return 0;
  const auto in_period =
      std::ranges::lower_bound(period_, page % prefill_pages_, {}, &Place::prefill_page);
  return page / prefill_pages_ * period_.size() +
         static_cast<std::uint64_t>(in_period - period_.begin());
}

void UnitList::offsets(Side side, std::uint64_t first, std::span<const LocalPage> pages,
                       std::uint64_t first_page, std::uint64_t page_stride,
                       std::uint64_t token_stride, std::span<std::uint64_t> out) const noexcept {
  if (out.empty()) return;
  const auto fill = [&](auto page_of, auto token_of, std::uint64_t period_pages) {
    std::uint64_t at = first % period_.size();
    // Of the period in `pages`; may wrap below 0 until a page is added.
    std::uint64_t base = first / period_.size() * period_pages - first_page;
    for (std::uint64_t& offset : out) {
      const Place& place = period_[at];
      offset = index(pages[base + place.*page_of]) * page_stride + place.*token_of * token_stride;
      if (++at == period_.size()) {
        at = 0;
        base += period_pages;
      }
    }
  };
  if (side == Side::prefill) {
    fill(&Place::prefill_page, &Place::prefill_token, prefill_pages_);
  } else {
    fill(&Place::decode_page, &Place::decode_token, decode_pages_);
  }
}

void UnitList::token_offsets(Side side, std::uint64_t unit, std::uint32_t skip,
                             std::span<const LocalPage> pages, std::uint64_t first_page,
                             std::uint64_t page_stride, std::uint64_t token_stride,
                             std::span<std::uint64_t> out) const noexcept {
  const Place place = (*this)[unit];
  const bool prefill = side == Side::prefill;
  const std::uint64_t page = (prefill ? place.prefill_page : place.decode_page) - first_page;
  const std::uint64_t token = prefill ? place.prefill_token : place.decode_token;
  const std::uint64_t run_stride = prefill ? prefill_run_stride_ : decode_run_stride_;
  std::uint64_t number = skip;
  for (std::uint64_t& offset : out) {
    const std::uint64_t in_page = token + number / run_tokens_ * run_stride + number % run_tokens_;
    offset = index(pages[page]) * page_stride + in_page * token_stride;
    ++number;
  }
}

// --- Token maps ---

Result<TokenMap> TokenMap::create(const BufferGroup& prefill, const BufferGroup& decode) {
  const auto [prefill_field, prefill_stripe] = stripe_field(prefill);
  const auto [decode_field, decode_stripe] = stripe_field(decode);
  const auto [shorter, longer] = std::minmax(prefill_stripe, decode_stripe);
  if (longer % shorter != 0)
    return differs(fmt::format(
        "{}.{} is {} on prefill and {}{} on decode: neither divides the other", prefill.name,
        prefill_field, prefill_stripe,
        decode_field == prefill_field ? "" : fmt::format("{} ", decode_field), decode_stripe));
  TokenMap map;
  map.prefill_ = {prefill.page_size, prefill.parts, prefill_stripe, shorter};
  map.decode_ = {decode.page_size, decode.parts, decode_stripe, shorter};
  map.run_tokens_ = shorter;
  map.run_stride_ = shorter;
  const std::uint64_t a = std::uint64_t{prefill.page_size} * prefill.parts;
  const std::uint64_t b = std::uint64_t{decode.page_size} * decode.parts;
  if (__builtin_mul_overflow(a / std::gcd(a, b), b, &map.period_tokens_) ||
      map.period_tokens_ / shorter > kMaxCells)
    return differs(fmt::format(
        "{}.page_size x parts is {} x {} on prefill and {} x {} on decode: in pieces of "
        "{} tokens, they repeat after more than {} pieces",
        prefill.name, prefill.page_size, prefill.parts, decode.page_size, decode.parts, shorter,
        kMaxCells));
  map.find_runs();
  return map;
}

// Of the cell that starts at `token`, for the ranks of the phases that hold it.
UnitList::Place TokenMap::place(std::uint64_t token) const noexcept {
  const auto local = [token](const Pattern& side) {
    return token / (std::uint64_t{side.stripe} * side.parts) * side.stripe + token % side.stripe;
  };
  const std::uint64_t prefill = local(prefill_);
  const std::uint64_t decode = local(decode_);
  return {.prefill_page = prefill / prefill_.page_size,
          .prefill_token = static_cast<std::uint32_t>(prefill % prefill_.page_size),
          .decode_page = decode / decode_.page_size,
          .decode_token = static_cast<std::uint32_t>(decode % decode_.page_size),
          .first_token = token};
}

// Makes cells that lie in the same two pages one unit, when equally many at the same strides always do,
// whatever the phases.
void TokenMap::find_runs() {
  struct Cell {
    std::uint32_t prefill_phase, decode_phase;
    UnitList::Place place;
  };
  std::vector<Cell> cells;
  cells.reserve(period_tokens_ / run_tokens_);
  for (std::uint64_t token = 0; token < period_tokens_; token += run_tokens_)
    cells.push_back({static_cast<std::uint32_t>(token / prefill_.stripe % prefill_.parts),
                     static_cast<std::uint32_t>(token / decode_.stripe % decode_.parts),
                     place(token)});
  std::ranges::stable_sort(cells, {}, [](const Cell& cell) {
    return std::pair{cell.prefill_phase, cell.decode_phase};  // stays in token order within
  });
  const auto same_pages = [](const Cell& a, const Cell& b) {
    return a.prefill_phase == b.prefill_phase && a.decode_phase == b.decode_phase &&
           a.place.prefill_page == b.place.prefill_page &&
           a.place.decode_page == b.place.decode_page;
  };
  struct Step {
    std::uint64_t tokens;
    std::uint32_t prefill, decode;
    bool operator==(const Step&) const = default;
  };
  const auto step = [](const Cell& from, const Cell& to) {
    return Step{to.place.first_token - from.place.first_token,
                to.place.prefill_token - from.place.prefill_token,
                to.place.decode_token - from.place.decode_token};
  };

  // The first pair of pages gives the measure, all others are held against it.
  std::size_t runs = 1;
  while (runs < cells.size() && same_pages(cells[0], cells[runs])) ++runs;
  if (runs == 1 || cells.size() % runs != 0) return;
  const Step first = step(cells[0], cells[1]);
  for (std::size_t i = 1; i < cells.size(); ++i) {
    if (i % runs == 0) continue;  // a new unit
    if (!same_pages(cells[i - 1], cells[i]) || step(cells[i - 1], cells[i]) != first) return;
  }
  runs_ = static_cast<std::uint32_t>(runs);
  run_stride_ = first.tokens;
  prefill_.run_stride = first.prefill;
  decode_.run_stride = first.decode;
}

TokenMap TokenMap::by_run() const {
  TokenMap map = *this;
  map.runs_ = 1;
  map.run_stride_ = map.prefill_.run_stride = map.decode_.run_stride = run_tokens_;
  return map;
}

UnitList TokenMap::units(std::uint32_t prefill_phase, std::uint32_t decode_phase) const {
  UnitList list;
  list.period_tokens_ = period_tokens_;
  list.prefill_pages_ = period_tokens_ / prefill_.parts / prefill_.page_size;
  list.decode_pages_ = period_tokens_ / decode_.parts / decode_.page_size;
  list.runs_ = runs_;
  list.run_tokens_ = run_tokens_;
  list.run_stride_ = run_stride_;
  list.prefill_run_stride_ = prefill_.run_stride;
  list.decode_run_stride_ = decode_.run_stride;

  // The cells are the stripes of one side, those of the other are made of them: in each longer
  // stripe of the one phase, every parts-th shorter one is of the other phase.
  const bool prefill_longer = prefill_.stripe > decode_.stripe;
  const Pattern& longer = prefill_longer ? prefill_ : decode_;
  const Pattern& shorter = prefill_longer ? decode_ : prefill_;
  const std::uint32_t longer_phase = prefill_longer ? prefill_phase : decode_phase;
  const std::uint32_t shorter_phase = prefill_longer ? decode_phase : prefill_phase;
  // As many as there are when each longer stripe has whole rounds of shorter ones, or one.
  list.period_.reserve(period_tokens_ / run_tokens_ / runs_ / longer.parts / shorter.parts *
                       std::gcd(longer.parts, shorter.parts));
  std::uint64_t cells = 0;
  for (std::uint64_t start = std::uint64_t{longer.stripe} * longer_phase; start < period_tokens_;
       start += std::uint64_t{longer.stripe} * longer.parts) {
    const std::uint64_t cell = start / run_tokens_;
    const std::uint64_t end = cell + longer.stripe / run_tokens_;
    const std::uint64_t ahead =
        (shorter_phase + shorter.parts - cell % shorter.parts) % shorter.parts;
    for (std::uint64_t c = cell + ahead; c < end; c += shorter.parts) {
      if (cells++ % runs_ == 0) list.period_.push_back(place(c * run_tokens_));
    }
  }
  return list;
}

// --- Who gives what ---

namespace {

struct Interval {
  std::uint32_t begin, end;

  [[nodiscard]] bool contains(Interval other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
};

Interval layers_of(const BufferGroup& group) noexcept {
  return {group.first_layer, group.first_layer + group.layers};
}
Interval heads_of(const BufferGroup& group) noexcept {
  return {group.first_head, group.first_head + group.heads};
}

// `whole`, cut wherever the interval of a prefill rank begins or ends.
std::vector<Interval> cut(Interval whole, std::span<const Geometry> prefill, std::size_t group,
                          Interval (*interval_of)(const BufferGroup&) noexcept) {
  std::set<std::uint32_t> ends{whole.begin, whole.end};
  for (const Geometry& rank : prefill) {
    const Interval held = interval_of(rank.groups[group]);
    for (const std::uint32_t end : {held.begin, held.end}) {
      if (whole.begin < end && end < whole.end) ends.insert(end);
    }
  }
  std::vector<Interval> pieces;
  for (auto end = std::next(ends.begin()); end != ends.end(); ++end)
    pieces.push_back({*std::prev(end), *end});
  return pieces;
}

// Which of so many ranks that hold the same gives it to a decode rank. Takes all decode ranks to hold
// about as much as this one; then so many want the same heads and layers, and this one is number
// `place` among them: part by part, and in a part in the order of ranks, of which those that hold
// copies of the same are neighbours.
std::size_t choose(const Geometry& decode, const BufferGroup& group, std::size_t candidates) {
  const auto shares = [](std::uint64_t all, std::uint64_t held) { return (all + held / 2) / held; };
  const std::uint64_t wanting =
      std::max<std::uint64_t>(1, decode.ranks / shares(group.all_heads(), group.heads) /
                                     shares(group.all_layers(), group.layers));
  const std::uint64_t copies = std::max<std::uint64_t>(1, wanting / group.parts);
  const std::uint64_t place = (group.part * copies + decode.rank % copies) % wanting;
  return place * candidates / wanting;
}

// Both sides interleave, so that their phases are known beforehand.
bool phases_known(const BufferGroup& prefill, const BufferGroup& decode) noexcept {
  return prefill.stripe() < prefill.page_size && decode.stripe() < decode.page_size;
}

// Adds a rectangle to those that one rank gives. They come layer by layer, in order of heads.
void add_heads(std::vector<Lane>& lanes, const Lane& lane) {
  if (!lanes.empty()) {
    Lane& last = lanes.back();
    if (last.group == lane.group && last.first_layer == lane.first_layer &&
        last.first_head + last.heads == lane.first_head) {
      last.heads += lane.heads;
      return;
    }
  }
  lanes.push_back(lane);
}

// Joins rectangles of the same heads whose layers follow each other.
std::vector<Lane> join_layers(std::span<const Lane> lanes) {
  std::vector<Lane> joined;
  for (const Lane& lane : lanes) {
    const auto above = std::ranges::find_if(joined, [&](const Lane& other) {
      return other.group == lane.group && other.first_head == lane.first_head &&
             other.heads == lane.heads && other.first_layer + other.layers == lane.first_layer;
    });
    if (above != joined.end()) {
      above->layers += lane.layers;
    } else {
      joined.push_back(lane);
    }
  }
  return joined;
}

// Requires a decode rank that holds something of the group.
Status assign_group(std::span<const Geometry> prefill, const Geometry& decode, std::uint32_t g,
                    std::vector<std::vector<Lane>>& lanes) {
  const BufferGroup& wanted = decode.groups[g];
  KVSHARD_TRY(const auto tokens, TokenMap::create(prefill[0].groups[g], wanted));
  std::vector<std::size_t> candidates;
  for (const Interval layers : cut(layers_of(wanted), prefill, g, layers_of)) {
    for (const Interval heads : cut(heads_of(wanted), prefill, g, heads_of)) {
      for (std::uint32_t part = 0; part < prefill[0].groups[g].parts; ++part) {
        candidates.clear();
        for (std::size_t p = 0; p < prefill.size(); ++p) {
          const BufferGroup& held = prefill[p].groups[g];
          if (held.part == part && layers_of(held).contains(layers) &&
              heads_of(held).contains(heads))
            candidates.push_back(p);
        }
        if (candidates.empty())
          return Error{
              ErrorCode::failed_precondition,
              fmt::format("group {}: no prefill rank holds layers [{}, {}), heads [{}, {}) of part "
                          "{} of {}",
                          wanted.name, layers.begin, layers.end, heads.begin, heads.end, part,
                          prefill[0].groups[g].parts)};
        if (phases_known(prefill[0].groups[g], wanted) && tokens.units(part, wanted.part).empty())
          continue;
        add_heads(
            lanes[candidates[choose(decode, wanted, candidates.size())]],
            {g, layers.begin, layers.end - layers.begin, heads.begin, heads.end - heads.begin});
      }
    }
  }
  return {};
}

// What all prefill ranks have in common is equal.
Status check_alike(std::span<const Geometry> prefill) {
  const auto first = describe(prefill[0]);
  for (std::size_t p = 1; p < prefill.size(); ++p) {
    KVSHARD_TRY(validate(prefill[p]));
    const auto other = describe(prefill[p]);
    const auto [a, b] = std::ranges::mismatch(first, other);
    if (a != first.end())
      return differs(fmt::format("{} is {} on prefill rank 0 and {} on prefill rank {}", a->first,
                                 a->second, b->second, p));
  }
  return {};
}

}  // namespace

Result<std::vector<std::vector<Lane>>> assign_lanes(std::span<const Geometry> prefill,
                                                    const Geometry& decode) {
  if (prefill.empty()) return Error{ErrorCode::invalid_argument, "there are no prefill ranks"};
  KVSHARD_TRY(check_compatible(prefill[0], decode));
  KVSHARD_TRY(check_alike(prefill));
  std::vector<std::vector<Lane>> lanes(prefill.size());
  for (std::uint32_t g = 0; g < decode.groups.size(); ++g) {
    if (decode.groups[g].layers != 0) KVSHARD_TRY(assign_group(prefill, decode, g, lanes));
  }
  for (auto& given : lanes) given = join_layers(given);
  return lanes;
}

Result<std::vector<std::uint32_t>> count_pullers(std::span<const Geometry> prefill,
                                                 std::span<const Geometry> decode) {
  std::vector<std::uint32_t> pullers(prefill.size());
  for (const Geometry& rank : decode) {
    KVSHARD_TRY(const auto lanes, assign_lanes(prefill, rank));
    for (std::size_t p = 0; p < lanes.size(); ++p) pullers[p] += lanes[p].empty() ? 0 : 1;
  }
  return pullers;
}

// --- The plan between two ranks ---

namespace {

struct Dimension {
  std::uint64_t count, stride;
};

// Rows of `row_bytes` in up to three dimensions, outermost first, with what touches joined.
// None when more than two levels of strides are left.
std::optional<FragmentShape> make_shape(std::array<Dimension, 3> dimensions,
                                        std::uint64_t row_bytes) noexcept {
  std::array<Dimension, 3> levels{};  // innermost first
  std::size_t depth = 0;
  for (auto dimension = dimensions.rbegin(); dimension != dimensions.rend(); ++dimension) {
    if (dimension->count == 1) continue;
    if (depth == 0 && dimension->stride == row_bytes) {
      row_bytes *= dimension->count;
      continue;
    }
    if (depth != 0) {
      Dimension& inner = levels[depth - 1];
      const std::uint64_t joined = inner.count * dimension->count;
      if (dimension->stride == inner.stride * inner.count &&
          joined <= std::numeric_limits<std::uint32_t>::max()) {
        inner.count = joined;
        continue;
      }
    }
    levels[depth++] = *dimension;
  }
  if (depth > 2) return std::nullopt;
  FragmentShape shape{.row_bytes = row_bytes};
  if (depth == 2) {
    shape.inner = static_cast<std::uint32_t>(levels[0].count);
    shape.inner_stride = levels[0].stride;
  }
  if (depth != 0) {
    shape.outer = static_cast<std::uint32_t>(levels[depth - 1].count);
    shape.outer_stride = levels[depth - 1].stride;
  }
  return shape;
}

// How a unit of a lane's heads lies on one side; `heads_first` when the slot has [head][token] order.
std::optional<FragmentShape> unit_shape(const BufferGroup& group, const TokenMap& tokens, Side side,
                                        std::uint32_t heads, bool heads_first) noexcept {
  const auto [token_stride, head_stride, page_stride] = strides(group);
  const Dimension runs{tokens.runs(), tokens.run_stride(side) * token_stride};
  const Dimension run{tokens.run_tokens(), token_stride};
  const Dimension head{heads, head_stride};
  return make_shape(heads_first ? std::array{head, runs, run} : std::array{runs, run, head},
                    group.head_bytes);
}

bool both_head_major(const BufferGroup& prefill, const BufferGroup& decode) noexcept {
  return prefill.order == PageOrder::head_major && decode.order == PageOrder::head_major;
}

bool holds(const BufferGroup& group, const Lane& lane) noexcept {
  const auto inside = [](std::uint32_t first, std::uint32_t count, Interval held) {
    return count != 0 && first >= held.begin && first <= held.end && count <= held.end - first;
  };
  return inside(lane.first_layer, lane.layers, layers_of(group)) &&
         inside(lane.first_head, lane.heads, heads_of(group));
}

bool overlap(const Lane& a, const Lane& b) noexcept {
  const auto cross = [](std::uint32_t first_a, std::uint32_t count_a, std::uint32_t first_b,
                        std::uint32_t count_b) {
    return first_a < first_b + count_b && first_b < first_a + count_a;
  };
  return a.group == b.group && cross(a.first_layer, a.layers, b.first_layer, b.layers) &&
         cross(a.first_head, a.heads, b.first_head, b.heads);
}

std::string to_string(const Lane& lane) {
  return fmt::format("layers [{}, {}), heads [{}, {})", lane.first_layer,
                     std::uint64_t{lane.first_layer} + lane.layers, lane.first_head,
                     std::uint64_t{lane.first_head} + lane.heads);
}

Status check_lanes(const Geometry& prefill, const Geometry& decode, std::span<const Lane> lanes) {
  std::uint64_t buffers = 0;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const Lane& lane = lanes[i];
    if (lane.group >= prefill.groups.size())
      return Error{ErrorCode::invalid_argument, fmt::format("lane {} is of group {}, there are {}",
                                                            i, lane.group, prefill.groups.size())};
    for (const auto& [side, groups] :
         {std::pair{"prefill", &prefill.groups}, {"decode", &decode.groups}}) {
      const BufferGroup& group = (*groups)[lane.group];
      if (!holds(group, lane))
        return Error{ErrorCode::invalid_argument,
                     fmt::format("lane {} of group {} has {}, the {} rank holds {}", i, group.name,
                                 to_string(lane), side,
                                 to_string(Lane{lane.group, group.first_layer, group.layers,
                                                group.first_head, group.heads}))};
    }
    // Before the pairs are compared: bounds their number too.
    buffers += std::uint64_t{lane.layers} * prefill.groups[lane.group].buffers_per_layer;
    if (buffers > kMaxBuffers)
      return Error{ErrorCode::invalid_argument,
                   fmt::format("lanes up to number {} make {} buffers, at most {} allowed", i,
                               buffers, kMaxBuffers)};
    for (std::size_t other = 0; other < i; ++other) {
      if (overlap(lanes[other], lane))
        return Error{
            ErrorCode::invalid_argument,
            fmt::format("lanes {} and {} of group {} overlap: {} and {}", other, i,
                        prefill.groups[lane.group].name, to_string(lanes[other]), to_string(lane))};
    }
  }
  return {};
}

}  // namespace

Result<TransferPlan> TransferPlan::create(const Geometry& prefill, const Geometry& decode,
                                          std::span<const Lane> lanes) {
  KVSHARD_TRY(check_compatible(prefill, decode));
  KVSHARD_TRY(check_lanes(prefill, decode, lanes));
  std::vector<Lane> ordered(lanes.begin(), lanes.end());
  const auto table_of = [&](const Lane& lane) { return prefill.groups[lane.group].table; };
  std::ranges::stable_sort(ordered, {}, table_of);

  TransferPlan plan;
  plan.unit_bytes_.push_back(0);
  plan.token_bytes_.push_back(0);
  for (auto first = ordered.begin(); first != ordered.end();) {
    const auto end = std::ranges::upper_bound(first, ordered.end(), table_of(*first), {}, table_of);
    KVSHARD_TRY(auto tokens,
                TokenMap::create(prefill.groups[first->group], decode.groups[first->group]));
    const auto fits = [&](const Lane& lane) {
      const BufferGroup& from = prefill.groups[lane.group];
      const BufferGroup& to = decode.groups[lane.group];
      const bool heads_first = both_head_major(from, to);
      return unit_shape(from, tokens, Side::prefill, lane.heads, heads_first) &&
             unit_shape(to, tokens, Side::decode, lane.heads, heads_first);
    };
    if (!std::all_of(first, end, fits)) tokens = tokens.by_run();

    const std::uint32_t first_buffer = plan.buffers();
    for (; first != end; ++first) plan.add_lane(prefill, decode, *first, tokens);
    plan.tables_.push_back(
        {table_of(*std::prev(end)), first_buffer, plan.buffers() - first_buffer, tokens});
  }
  return plan;
}

void TransferPlan::add_lane(const Geometry& prefill, const Geometry& decode, const Lane& lane,
                            const TokenMap& tokens) {
  const BufferGroup& from = prefill.groups[lane.group];
  const BufferGroup& to = decode.groups[lane.group];
  const auto side = [&](const BufferGroup& group, Side which) {
    const auto [token_stride, head_stride, page_stride] = strides(group);
    return LaneSide{
        .first_pool_buffer = (lane.first_layer - group.first_layer) * group.buffers_per_layer,
        .offset = (lane.first_head - group.first_head) * head_stride,
        .page_stride = page_stride,
        .token_stride = token_stride,
        // By run, there are two dimensions, and a shape of them always.
        .unit = *unit_shape(group, tokens, which, lane.heads, both_head_major(from, to)),
        .token = *make_shape({{{1, 0}, {1, 0}, {lane.heads, head_stride}}}, group.head_bytes)};
  };
  const std::uint32_t count = lane.layers * from.buffers_per_layer;
  lanes_.push_back({.lane = lane,
                    .first_buffer = buffers(),
                    .buffer_count = count,
                    .prefill = side(from, Side::prefill),
                    .decode = side(to, Side::decode)});
  const std::uint64_t token_bytes = std::uint64_t{lane.heads} * from.head_bytes;
  for (std::uint32_t b = 0; b < count; ++b) {
    unit_bytes_.push_back(unit_bytes_.back() + token_bytes * tokens.unit_tokens());
    token_bytes_.push_back(token_bytes_.back() + token_bytes);
  }
}

const TransferPlan::Table* TransferPlan::find_table(std::uint32_t number) const noexcept {
  const auto found = std::ranges::find(tables_, number, &Table::number);
  return found == tables_.end() ? nullptr : &*found;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> TransferPlan::layer_ranges(
    const Table& table, std::uint32_t first, std::uint32_t count) const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
  const std::uint64_t last = std::uint64_t{first} + count;
  for (const LaneBuffers& lane : lanes_) {
    if (lane.first_buffer < table.first_buffer ||
        lane.first_buffer >= table.first_buffer + table.buffer_count)
      continue;
    const std::uint32_t lane_first = lane.lane.first_layer;
    const auto end =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(last, lane_first + lane.lane.layers));
    const std::uint32_t begin = std::max(first, lane_first);
    if (begin >= end) continue;
    const std::uint32_t per_layer = lane.buffer_count / lane.lane.layers;
    const std::uint32_t first_buffer = lane.first_buffer + (begin - lane_first) * per_layer;
    const std::uint32_t buffer_count = (end - begin) * per_layer;
    if (!ranges.empty() && ranges.back().first + ranges.back().second == first_buffer) {
      ranges.back().second += buffer_count;  // whole neighbouring lanes go together
    } else {
      ranges.emplace_back(first_buffer, buffer_count);
    }
  }
  return ranges;
}

}  // namespace kvshard
