// Moves whole requests between pools of unlike geometry as the plan says, and compares every byte with
// where a slow, obvious count of tokens puts it. A "byte" of a pool is a number here that names what it
// is, so that no two are alike.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/plan.hpp"

namespace kvshard {
namespace {

using Byte = std::uint32_t;
constexpr Byte kCanary = 0xffff'ffff;
constexpr Byte kNobodysByte = 0xeeee'eeee;  // of a source pool, outside of the request

using Random = std::mt19937;

std::uint32_t pick(Random& random, std::uint32_t low, std::uint32_t high) {
  return low + static_cast<std::uint32_t>(random() % (high - low + 1));
}
template <class T>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

// How a side cuts the tokens of a table.
struct Cut {
  std::uint32_t page_size{4}, parts{1}, interleave{0};
};

struct TableCase {
  Cut prefill{}, decode{};
  std::uint32_t prefill_base{0}, decode_base{0};  // rotation of the chains
  std::uint64_t first_token{0}, tokens{0};        // wanted: all from first_token on
};

struct GroupCase {
  std::uint32_t table{0};
  std::uint32_t layers{1}, buffers_per_layer{1}, heads{1}, head_bytes{1};
  PageOrder prefill_order{PageOrder::token_major}, decode_order{PageOrder::token_major};
  bool gaps{false};
};

// Ranks of a side: stages x tensor parallel x shards.
struct SideCase {
  std::uint32_t stages{1}, tensor_parallel{1}, shards{1};
};

struct Case {
  SideCase prefill{}, decode{};
  std::vector<TableCase> tables;
  std::vector<GroupCase> groups;
};

// --- Geometries of a case ---

// Random strides that keep bytes apart, in the group's order.
void spread(Random& random, BufferGroup& group) {
  const auto gap = [&](std::uint64_t least) { return least + pick(random, 0, 3); };
  const bool token_major = group.order == PageOrder::token_major;
  auto& inner = token_major ? group.head_stride : group.token_stride;
  auto& outer = token_major ? group.token_stride : group.head_stride;
  const std::uint32_t inner_count = token_major ? group.heads : group.page_size;
  const std::uint32_t outer_count = token_major ? group.page_size : group.heads;
  inner = gap(group.head_bytes);
  const std::uint64_t inner_extent = inner * (inner_count - 1) + group.head_bytes;
  if (!token_major && pick(random, 0, 3) == 0) {  // [head][page][token]
    group.page_stride = gap(inner_extent);
    outer = gap(group.page_stride * group.page_count);
    return;
  }
  outer = gap(inner_extent);
  group.page_stride = gap(outer * (outer_count - 1) + inner_extent);
}

// A copy of some of what a rank holds.
Geometry make_copy(Geometry rank, Random& random) {
  for (BufferGroup& group : rank.groups) {
    const std::uint32_t heads = pick(random, 1, group.heads);
    group.first_head += pick(random, 0, group.heads - heads);
    group.heads = heads;
    const std::uint32_t layers = pick(random, 0, group.layers);
    group.first_layer += pick(random, 0, group.layers - layers);
    group.layers = layers;
  }
  return rank;
}

std::vector<Geometry> make_side(const Case& made, bool prefill, Random& random) {
  const SideCase& side = prefill ? made.prefill : made.decode;
  std::vector<std::vector<std::uint32_t>> ends;  // of the stages' layers, by group
  for (const GroupCase& group : made.groups) {
    std::vector<std::uint32_t> cuts{0, group.layers};
    while (cuts.size() <= side.stages) cuts.push_back(pick(random, 0, group.layers));
    std::ranges::sort(cuts);
    ends.push_back(cuts);
  }
  std::vector<Geometry> ranks;
  for (std::uint32_t stage = 0; stage < side.stages; ++stage) {
    for (std::uint32_t tp = 0; tp < side.tensor_parallel; ++tp) {
      for (std::uint32_t shard = 0; shard < side.shards; ++shard) {
        Geometry rank{.model_id = "m",
                      .groups = {},
                      .rank = static_cast<std::uint32_t>(ranks.size()),
                      .ranks = side.stages * side.tensor_parallel * side.shards};
        for (std::size_t g = 0; g < made.groups.size(); ++g) {
          const GroupCase& group = made.groups[g];
          const TableCase& table = made.tables[group.table];
          const Cut& cut = prefill ? table.prefill : table.decode;
          const std::uint32_t first_head = tp * group.heads / side.tensor_parallel;
          const std::uint32_t end_head = (tp + 1) * group.heads / side.tensor_parallel;
          BufferGroup share{.name = "g" + std::to_string(g),
                            .layers = ends[g][stage + 1] - ends[g][stage],
                            .buffers_per_layer = group.buffers_per_layer,
                            .heads = std::max(1U, end_head - first_head),
                            .head_bytes = group.head_bytes,
                            .order = prefill ? group.prefill_order : group.decode_order,
                            .page_size = cut.page_size,
                            .page_count = static_cast<std::uint32_t>(
                                table.tokens / cut.page_size / cut.parts + 5),
                            .table = group.table,
                            .parts = cut.parts,
                            .part = cut.parts == 1 ? 0 : shard,
                            .interleave = cut.interleave,
                            .first_head = first_head,
                            .total_heads = group.heads,
                            .first_layer = ends[g][stage],
                            .total_layers = group.layers};
          if (group.gaps) spread(random, share);
          rank.groups.push_back(share);
        }
        const Status valid = validate(rank);
        EXPECT_TRUE(valid) << valid.error().message;
        ranks.push_back(std::move(rank));
      }
    }
  }
  if (pick(random, 0, 2) == 0) ranks.push_back(make_copy(ranks[random() % ranks.size()], random));
  return ranks;
}

// --- Pools, and where things lie in them ---

struct Rank {
  Geometry geometry;
  std::vector<std::vector<LocalPage>> pages;            // of the request, by table
  std::vector<std::vector<std::vector<Byte>>> buffers;  // by group
};

bool by_page(const BufferGroup& group) {
  return group.parts > 1 && (group.interleave == 0 || group.interleave == group.page_size);
}

// Whether the rank holds a token, from the definition of ownership.
bool owns(const BufferGroup& group, std::uint32_t base, std::uint64_t token) {
  if (group.parts == 1) return true;
  if (by_page(group)) return (base + token / group.page_size) % group.parts == group.part;
  return token / group.interleave % group.parts == group.part;
}

Byte name_of(std::size_t group, std::uint64_t buffer, std::uint64_t head, std::uint64_t token,
             std::uint64_t byte) {
  return static_cast<Byte>((((group * 32 + buffer) * 8 + head) * 4096 + token) * 4 + byte);
}

struct Strides {
  std::uint64_t token, head, page;
};

// As the declaration says, 0 meaning packed.
Strides strides_of(const BufferGroup& group) {
  const bool token_major = group.order == PageOrder::token_major;
  const std::uint64_t row = group.head_bytes;
  const std::uint64_t packed_token = token_major ? row * group.heads : row;
  const std::uint64_t packed_head = token_major ? row : row * group.page_size;
  const std::uint64_t packed_page = row * group.heads * group.page_size;
  return {group.token_stride ? group.token_stride : packed_token,
          group.head_stride ? group.head_stride : packed_head,
          group.page_stride ? group.page_stride : packed_page};
}

// Puts what the request has in tokens [first, end) where the declaration says.
void place(Rank& rank, std::size_t g, std::uint32_t base, std::uint64_t first, std::uint64_t end) {
  const BufferGroup& group = rank.geometry.groups[g];
  const auto [token_stride, head_stride, page_stride] = strides_of(group);
  std::uint64_t held = 0;
  for (std::uint64_t token = 0; token < end; ++token) {
    if (!owns(group, base, token)) continue;
    const std::uint64_t page = index(rank.pages[group.table].at(held / group.page_size));
    const std::uint64_t at = page * page_stride + held % group.page_size * token_stride;
    ++held;
    if (token < first) continue;
    for (std::uint32_t buffer = 0; buffer < group.buffers(); ++buffer) {
      const std::uint32_t whole = group.first_layer * group.buffers_per_layer + buffer;
      for (std::uint32_t head = 0; head < group.heads; ++head) {
        for (std::uint32_t byte = 0; byte < group.head_bytes; ++byte)
          rank.buffers[g][buffer].at(at + head * head_stride + byte) =
              name_of(g, whole, group.first_head + head, token, byte);
      }
    }
  }
}

Rank make_rank(const Case& made, Geometry geometry, bool prefill, Random& random) {
  Rank rank{.geometry = std::move(geometry), .pages = {}, .buffers = {}};
  rank.pages.resize(made.tables.size());
  for (std::size_t g = 0; g < rank.geometry.groups.size(); ++g) {
    const BufferGroup& group = rank.geometry.groups[g];
    auto& pages = rank.pages[group.table];
    if (pages.empty()) {
      for (std::uint32_t page = 1; page < group.page_count; ++page)
        pages.push_back(LocalPage{page});
      std::ranges::shuffle(pages, random);
    }
    const auto [token_stride, head_stride, page_stride] = strides_of(group);
    const std::uint64_t extent = page_stride * (group.page_count - 1) +
                                 token_stride * (group.page_size - 1) +
                                 head_stride * (group.heads - 1) + group.head_bytes;
    rank.buffers.emplace_back(group.buffers(),
                              std::vector<Byte>(extent, prefill ? kNobodysByte : kCanary));
  }
  return rank;
}

std::uint64_t round_up(std::uint64_t tokens, std::uint64_t step) {
  return (tokens + step - 1) / step * step;
}

// Where a transfer of a table ends: at the end of a page of either side.
std::uint64_t end_of(const TableCase& table) {
  const auto span = [](const Cut& cut) {
    const bool stripes = cut.parts > 1 && cut.interleave != 0 && cut.interleave != cut.page_size;
    return std::uint64_t{cut.page_size} * (stripes ? cut.parts : 1);
  };
  return std::min(round_up(table.tokens, span(table.prefill)),
                  round_up(table.tokens, span(table.decode)));
}

std::uint32_t phase(const BufferGroup& group, std::uint32_t base) {
  return by_page(group) ? (group.part + group.parts - base % group.parts) % group.parts
                        : group.part;
}

// --- Execution ---

// What a transfer moved, and what was wrong with it.
struct Tally {
  std::uint64_t landed{0}, overwritten{0};
};

// Calls `visit` with every byte of fragments of `shape`, in slot order.
template <class Visit>
void walk(const FragmentShape& shape, std::uint64_t offset, Visit visit) {
  for (std::uint32_t outer = 0; outer < shape.outer; ++outer) {
    for (std::uint32_t inner = 0; inner < shape.inner; ++inner) {
      for (std::uint64_t byte = 0; byte < shape.row_bytes; ++byte)
        visit(offset + outer * shape.outer_stride + inner * shape.inner_stride + byte);
    }
  }
}

// Units [first, first + count), or tokens [skip, skip + count) of unit `first`, of some buffers.
struct Piece {
  std::uint64_t first{0}, count{0};
  std::optional<std::uint32_t> skip{};
  std::uint32_t first_buffer{0}, buffer_count{0};
};

// Visits the bytes of a piece on one side in slot order.
template <class Visit>
void walk(const TransferPlan& plan, const UnitList& units, std::uint32_t table, Rank& rank,
          Side side, const Piece& piece, Visit visit) {
  const UnitList::Place start = units[piece.first];
  const std::uint64_t first_page = side == Side::prefill ? start.prefill_page : start.decode_page;
  const auto pages = std::span<const LocalPage>{rank.pages[table]}.subspan(first_page);
  std::vector<std::uint64_t> offsets(piece.count);
  for (const auto& lane : plan.lanes()) {
    const auto& at = lane.side(side);
    const std::uint32_t begin = std::max(piece.first_buffer, lane.first_buffer);
    const std::uint32_t end =
        std::min(piece.first_buffer + piece.buffer_count, lane.first_buffer + lane.buffer_count);
    if (begin >= end) continue;
    if (piece.skip) {
      units.token_offsets(side, piece.first, *piece.skip, pages, first_page, at.page_stride,
                          at.token_stride, offsets);
    } else {
      units.offsets(side, piece.first, pages, first_page, at.page_stride, at.token_stride, offsets);
    }
    for (std::uint32_t buffer = begin; buffer < end; ++buffer) {
      auto& memory =
          rank.buffers[lane.lane.group].at(at.first_pool_buffer + buffer - lane.first_buffer);
      for (const std::uint64_t offset : offsets)
        walk(piece.skip ? at.token : at.unit, offset + at.offset,
             [&](std::uint64_t byte) { visit(memory.at(byte)); });
    }
  }
}

void move(const TransferPlan& plan, const UnitList& units, std::uint32_t table, Rank& from,
          Rank& to, const Piece& piece, Tally& tally) {
  std::vector<Byte> slot;
  walk(plan, units, table, from, Side::prefill, piece, [&](Byte& byte) { slot.push_back(byte); });
  const std::uint64_t each = piece.skip ? plan.token_bytes(piece.first_buffer, piece.buffer_count)
                                        : plan.unit_bytes(piece.first_buffer, piece.buffer_count);
  ASSERT_EQ(slot.size(), each * piece.count);
  std::size_t at = 0;
  walk(plan, units, table, to, Side::decode, piece, [&](Byte& byte) {
    ++tally.landed;
    if (byte != kCanary) ++tally.overwritten;
    byte = slot.at(at++);
  });
  ASSERT_EQ(at, slot.size());
}

// All that one prefill rank gives one decode rank, in pieces of random sizes.
void pull(const Case& made, Rank& from, Rank& to, const std::vector<Lane>& lanes, Random& random,
          Tally& tally) {
  const auto plan = TransferPlan::create(from.geometry, to.geometry, lanes);
  ASSERT_TRUE(plan) << plan.error().message;
  for (const auto& table : plan->tables()) {
    const TableCase& wanted = made.tables[table.number];
    const auto in_table = [&](const BufferGroup& group) { return group.table == table.number; };
    const UnitList units = table.tokens.units(
        phase(*std::ranges::find_if(from.geometry.groups, in_table), wanted.prefill_base),
        phase(*std::ranges::find_if(to.geometry.groups, in_table), wanted.decode_base));
    const auto range = units.range(wanted.first_token, end_of(wanted));
    for (std::uint32_t buffer = 0; buffer < table.buffer_count;) {
      const std::uint32_t buffers = pick(random, 1, table.buffer_count - buffer);
      Piece piece{.first_buffer = table.first_buffer + buffer, .buffer_count = buffers};
      if (range.skip) {
        piece.first = range.first - 1;
        piece.count = table.tokens.unit_tokens() - *range.skip;
        piece.skip = range.skip;
        move(*plan, units, table.number, from, to, piece, tally);
        piece.skip.reset();
      }
      for (piece.first = range.first; piece.first < range.end; piece.first += piece.count) {
        piece.count = std::min<std::uint64_t>(range.end - piece.first, pick(random, 1, 20));
        move(*plan, units, table.number, from, to, piece, tally);
      }
      buffer += buffers;
    }
  }
}

std::string text(const Case& made) {
  const auto side = [](const SideCase& s) {
    return std::to_string(s.stages) + " stages x " + std::to_string(s.tensor_parallel) + " tp x " +
           std::to_string(s.shards) + " shards";
  };
  const auto cut = [](const Cut& c, std::uint32_t base) {
    return "page " + std::to_string(c.page_size) + " parts " + std::to_string(c.parts) +
           " interleave " + std::to_string(c.interleave) + " base " + std::to_string(base);
  };
  std::string result = side(made.prefill) + " to " + side(made.decode);
  for (const TableCase& t : made.tables)
    result += "\n table: " + cut(t.prefill, t.prefill_base) + " to " +
              cut(t.decode, t.decode_base) + ", tokens " + std::to_string(t.first_token) + " to " +
              std::to_string(t.tokens);
  for (const GroupCase& g : made.groups)
    result += "\n group: table " + std::to_string(g.table) + " layers " + std::to_string(g.layers) +
              " x " + std::to_string(g.buffers_per_layer) + " heads " + std::to_string(g.heads) +
              " x " + std::to_string(g.head_bytes) + " " + std::string{to_string(g.prefill_order)} +
              " to " + std::string{to_string(g.decode_order)} + (g.gaps ? " with gaps" : "");
  return result;
}

// Every decode rank pulls; each byte that it owes its engine arrives once, and nothing else changes.
void transfer(const Case& made, std::uint32_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text(made));
  Random random{seed};
  const std::vector<Geometry> prefill = make_side(made, true, random);
  const std::vector<Geometry> decode = make_side(made, false, random);
  std::vector<Rank> sources;
  for (const Geometry& geometry : prefill) {
    Rank& rank = sources.emplace_back(make_rank(made, geometry, true, random));
    for (std::size_t g = 0; g < made.groups.size(); ++g) {
      const TableCase& table = made.tables[made.groups[g].table];
      place(rank, g, table.prefill_base, 0, end_of(table));
    }
  }
  std::vector<std::uint32_t> pullers(prefill.size());
  for (const Geometry& geometry : decode) {
    const auto lanes = assign_lanes(prefill, geometry);
    ASSERT_TRUE(lanes) << lanes.error().message;
    ASSERT_EQ(lanes->size(), prefill.size());
    Rank rank = make_rank(made, geometry, false, random);
    Rank expected = rank;
    Tally tally;
    for (std::size_t p = 0; p < prefill.size(); ++p) {
      if ((*lanes)[p].empty()) continue;
      ++pullers[p];
      pull(made, sources[p], rank, (*lanes)[p], random, tally);
      if (testing::Test::HasFatalFailure()) return;
    }
    std::uint64_t owed = 0;
    for (std::size_t g = 0; g < made.groups.size(); ++g) {
      const BufferGroup& group = geometry.groups[g];
      const TableCase& table = made.tables[group.table];
      place(expected, g, table.decode_base, table.first_token, end_of(table));
      for (std::uint64_t token = table.first_token; token < end_of(table); ++token)
        owed += owns(group, table.decode_base, token)
                    ? std::uint64_t{group.buffers()} * group.heads * group.head_bytes
                    : 0;
    }
    ASSERT_EQ(tally.overwritten, 0U);
    ASSERT_EQ(tally.landed, owed);
    ASSERT_TRUE(rank.buffers == expected.buffers) << "decode rank " << geometry.rank;
  }
  if (seed % 8 != 0) return;  // assigns all over again
  const auto counted = count_pullers(prefill, decode);
  ASSERT_TRUE(counted) << counted.error().message;
  ASSERT_EQ(*counted, pullers);
}

// --- Cases ---

// Two token patterns of which one is made of the other, for up to so many shards on each side.
TableCase random_table(Random& random, std::uint32_t prefill_shards, std::uint32_t decode_shards) {
  const std::uint32_t cell = one_of(random, {1U, 1U, 2U, 3U, 4U});
  const auto cut = [&](std::uint32_t shards) {
    const std::uint32_t stripe = cell * one_of(random, {1U, 1U, 2U, 4U});
    Cut made{.page_size = stripe, .parts = pick(random, 0, 3) == 0 ? 1 : shards};
    if (pick(random, 0, 1) == 0) {
      made.interleave = stripe;
      if (made.parts > 1) made.page_size *= pick(random, 1, 4);
    }
    return made;
  };
  TableCase table{.prefill = cut(prefill_shards), .decode = cut(decode_shards)};
  table.prefill_base = pick(random, 0, 7);
  table.decode_base = pick(random, 0, 7);
  table.tokens = pick(random, 0, 64);
  table.first_token = pick(random, 0, 1) == 0 ? 0 : pick(random, 0, 64);
  table.first_token = std::min(table.first_token, end_of(table));
  return table;
}

Case random_case(Random& random) {
  const auto side = [&] {
    SideCase made{.stages = one_of(random, {1U, 1U, 2U, 3U}),
                  .tensor_parallel = one_of(random, {1U, 2U, 3U, 4U, 8U}),
                  .shards = pick(random, 1, 8)};
    while (made.stages * made.tensor_parallel * made.shards > 8) {
      auto& most =
          std::max({std::ref(made.stages), std::ref(made.tensor_parallel), std::ref(made.shards)},
                   [](auto a, auto b) { return a.get() < b.get(); })
              .get();
      most = (most + 1) / 2;
    }
    return made;
  };
  Case made{.prefill = side(), .decode = side(), .tables = {}, .groups = {}};
  const std::uint32_t tables = one_of(random, {1U, 1U, 2U, 3U});
  for (std::uint32_t t = 0; t < tables; ++t)
    made.tables.push_back(random_table(random, made.prefill.shards, made.decode.shards));
  if (tables == 3) {  // a state, one slot for each request
    made.tables[2] = {.prefill = {.page_size = 1}, .decode = {.page_size = 1}, .tokens = 1};
  }
  for (std::uint32_t g = 0; g < tables + pick(random, 0, 1); ++g) {
    made.groups.push_back(
        {.table = g < tables ? g : 0,
         .layers = pick(random, 1, 4),
         .buffers_per_layer = pick(random, 1, 2),
         .heads = one_of(random, {8U, 4U, 1U}),
         .head_bytes = pick(random, 1, 2),
         .prefill_order = one_of(random, {PageOrder::token_major, PageOrder::head_major}),
         .decode_order = one_of(random, {PageOrder::token_major, PageOrder::head_major}),
         .gaps = pick(random, 0, 1) == 0});
  }
  return made;
}

// acceptance 11, 12, 13, 14, 15, 16, 17, 18, 20: all at once, at random
TEST(PlanPropertyTest, EveryOwedByteArrivesOnceFromARankThatHasIt) {
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    Random random{seed};
    transfer(random_case(random), seed);
    if (HasFailure()) return;
  }
}

// acceptance 11
TEST(PlanPropertyTest, AnyTensorParallelDegreeToAnyOther) {
  for (const std::uint32_t heads : {8U, 4U, 1U}) {
    for (const std::uint32_t from : {1U, 2U, 4U, 8U}) {
      for (const std::uint32_t to : {1U, 2U, 4U, 8U}) {
        transfer({.prefill = {.tensor_parallel = from},
                  .decode = {.tensor_parallel = to},
                  .tables = {{.tokens = 21}},
                  .groups = {{.layers = 2, .buffers_per_layer = 2, .heads = heads}}},
                 from * 10 + to);
        if (HasFailure()) return;
      }
    }
  }
}

// acceptance 12, 13
TEST(PlanPropertyTest, AnyNumberOfShardsToAnyOther) {
  for (std::uint32_t from = 1; from <= 8; ++from) {
    for (std::uint32_t to = 1; to <= 8; ++to) {
      for (const std::uint32_t tensor_parallel : {1U, 2U, 4U}) {
        transfer({.prefill = {.shards = from},
                  .decode = {.tensor_parallel = tensor_parallel, .shards = to},
                  .tables = {{.prefill = {.page_size = 2, .parts = from},
                              .decode = {.page_size = 2, .parts = to},
                              .prefill_base = from / 2,
                              .decode_base = to - 1,
                              .first_token = 5,
                              .tokens = 135}},
                  .groups = {{}}},
                 from * 10 + to);
        if (HasFailure()) return;
      }
    }
  }
}

// acceptance 14, 16
TEST(PlanPropertyTest, InterleavedTokensToPagesAndBack) {
  for (const std::uint32_t interleave : {1U, 8U, 64U}) {
    for (const std::uint32_t parts : {2U, 8U}) {
      const Cut striped{.page_size = 64, .parts = parts, .interleave = interleave};
      for (const Cut& other :
           {Cut{.page_size = 64}, Cut{.page_size = 16}, Cut{.page_size = 256},
            Cut{.page_size = 64, .parts = 4}, Cut{.page_size = 128, .parts = 4, .interleave = 8}}) {
        for (const bool forth : {true, false}) {
          const Cut& from = forth ? striped : other;
          const Cut& to = forth ? other : striped;
          transfer({.prefill = {.shards = from.parts},
                    .decode = {.shards = to.parts},
                    .tables = {{.prefill = from, .decode = to, .first_token = 77, .tokens = 1100}},
                    .groups = {{.layers = 1}}},
                   interleave + parts);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// acceptance 13, 14, 19: what is illegal is refused before a plan exists, with field and values
TEST(PlanPropertyTest, IllegalPairsAreRefusedByName) {
  using Change = void (*)(Geometry&);
  struct Illegal {
    const char* field;
    Change change;
    std::string (*value)(const Geometry&);
  };
  const std::vector<Illegal> illegal{
      {"model_id", [](Geometry& g) { g.model_id = "other"; },
       [](const Geometry& g) { return g.model_id; }},
      {"groups", [](Geometry& g) { g.groups[0].name = "other"; },
       [](const Geometry& g) { return g.groups[0].name; }},
      {"g0.layers", [](Geometry& g) { g.groups[0].total_layers += 3; },
       [](const Geometry& g) { return std::to_string(g.groups[0].total_layers); }},
      {"g0.buffers_per_layer", [](Geometry& g) { g.groups[0].buffers_per_layer ^= 3; },
       [](const Geometry& g) { return std::to_string(g.groups[0].buffers_per_layer); }},
      {"g0.element_type", [](Geometry& g) { g.groups[0].element_type = ElementType::f8_e4m3; },
       [](const Geometry& g) { return std::string{to_string(g.groups[0].element_type)}; }},
      {"g0.heads", [](Geometry& g) { g.groups[0].total_heads += 8; },
       [](const Geometry& g) { return std::to_string(g.groups[0].total_heads); }},
      {"g0.head_bytes",
       [](Geometry& g) {
         g.groups[0].head_bytes += 5;
         g.groups[0].token_stride = g.groups[0].head_stride = g.groups[0].page_stride = 0;
       },
       [](const Geometry& g) { return std::to_string(g.groups[0].head_bytes); }},
      {"g0.table",
       [](Geometry& g) {
         for (BufferGroup& group : g.groups) group.table += 9;
       },
       [](const Geometry& g) { return std::to_string(g.groups[0].table); }},
      {"g0.page_size",
       [](Geometry& g) {
         for (BufferGroup& group : g.groups) {
           if (group.table != g.groups[0].table) continue;
           group.page_size = group.interleave = 5 * 7;
           group.token_stride = group.head_stride = group.page_stride = 0;
         }
       },
       [](const Geometry& g) { return std::to_string(g.groups[0].stripe()); }},
  };
  std::size_t refused = 0;
  for (std::uint32_t seed = 0; seed < 1000; ++seed) {
    Random random{seed};
    const Case made = random_case(random);
    const auto prefill = make_side(made, true, random);
    const auto decode = make_side(made, false, random);
    const Illegal& wrong = illegal[seed % illegal.size()];
    Geometry changed = decode[random() % decode.size()];
    // One divides the other, whatever it is.
    if (std::string{wrong.field} == "g0.page_size" && prefill[0].groups[0].stripe() == 1) continue;
    wrong.change(changed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + wrong.field + ": " + text(made));
    ASSERT_TRUE(validate(changed)) << validate(changed).error().message;
    const auto field = [&](const std::string& name) {
      const bool stripes =
          name == "g0.page_size" && prefill[0].groups[0].stripe() != prefill[0].groups[0].page_size;
      return stripes ? std::string{"g0.interleave"} : name;
    };
    const std::string told = "geometry differs: " + field(wrong.field) + " is ";
    const auto lanes = assign_lanes(prefill, changed);
    ASSERT_FALSE(lanes);
    EXPECT_EQ(lanes.error().code, ErrorCode::failed_precondition);
    EXPECT_EQ(lanes.error().message.substr(0, told.size()), told) << lanes.error().message;
    for (const std::string& value : {wrong.value(prefill[0]), wrong.value(changed)})
      EXPECT_NE(lanes.error().message.find(value, told.size()), std::string::npos)
          << value << " in " << lanes.error().message;
    const auto plan = TransferPlan::create(prefill[0], changed, {});
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().message, lanes.error().message);
    ++refused;
  }
  EXPECT_GT(refused, 900U);
}

}  // namespace
}  // namespace kvshard
