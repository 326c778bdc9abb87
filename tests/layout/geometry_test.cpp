#include "kvshard/geometry.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace kvshard {
namespace {

constexpr std::uint32_t kMax32 = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kMax64 = std::numeric_limits<std::uint64_t>::max();

BufferGroup group(PageOrder order = PageOrder::token_major) {
  return {.name = "kv",
          .layers = 2,
          .buffers_per_layer = 2,
          .element_type = ElementType::bf16,
          .heads = 4,
          .head_bytes = 16,
          .order = order,
          .page_size = 8,
          .page_count = 5};
}

Geometry geometry(BufferGroup only = group()) {
  return {.model_id = "tiny", .groups = {std::move(only)}};
}

// The message of the error that `change` brings about; empty when the geometry stays valid.
template <class Change>
std::string refusal(Change change) {
  Geometry changed = geometry();
  change(changed);
  const Status status = validate(changed);
  if (status) return {};
  EXPECT_EQ(status.error().code, ErrorCode::invalid_argument);
  return status.error().message;
}
template <class T>
std::string group_refusal(T BufferGroup::*field, T value) {
  return refusal([&](Geometry& changed) { changed.groups[0].*field = value; });
}

TEST(GeometryTest, AcceptsAPackedPool) {
  EXPECT_EQ(refusal([](Geometry&) {}), "");
  EXPECT_EQ(group_refusal(&BufferGroup::order, PageOrder::head_major), "");
  EXPECT_EQ(refusal([](Geometry& changed) { changed.model_id.clear(); }), "");
}

TEST(GeometryTest, NamesAFieldThatIsZero) {
  EXPECT_EQ(group_refusal(&BufferGroup::layers, 0U), "geometry: group kv: layers is 0");
  EXPECT_EQ(group_refusal(&BufferGroup::buffers_per_layer, 0U),
            "geometry: group kv: buffers_per_layer is 0");
  EXPECT_EQ(group_refusal(&BufferGroup::heads, 0U), "geometry: group kv: heads is 0");
  EXPECT_EQ(group_refusal(&BufferGroup::head_bytes, 0U), "geometry: group kv: head_bytes is 0");
  EXPECT_EQ(group_refusal(&BufferGroup::page_size, 0U), "geometry: group kv: page_size is 0");
  EXPECT_EQ(group_refusal(&BufferGroup::page_count, 0U), "geometry: group kv: page_count is 0");
}

TEST(GeometryTest, KeepsToItsLimits) {
  EXPECT_EQ(refusal([](Geometry& changed) { changed.groups.clear(); }),
            "geometry: 0 groups, 1 to 16 allowed");
  const auto groups = [](std::size_t count) {
    return refusal([&](Geometry& changed) {
      changed.groups.assign(count, group());
      for (std::size_t i = 0; i < count; ++i) changed.groups[i].name = "g" + std::to_string(i);
    });
  };
  EXPECT_EQ(groups(16), "");
  EXPECT_EQ(groups(17), "geometry: 17 groups, 1 to 16 allowed");
  EXPECT_EQ(group_refusal(&BufferGroup::layers, 2048U), "");
  EXPECT_EQ(group_refusal(&BufferGroup::layers, 2049U),
            "geometry: group kv: layers is 2049, which makes 4098 buffers, at most 4096 allowed");
  EXPECT_NE(group_refusal(&BufferGroup::layers, kMax32), "");
  EXPECT_EQ(group_refusal(&BufferGroup::buffers_per_layer, 3U),
            "geometry: group kv: buffers_per_layer is 3, at most 2 allowed");
  EXPECT_EQ(refusal([](Geometry& changed) { changed.model_id.assign(257, 'm'); }),
            "geometry: model_id has 257 bytes, at most 256 allowed");
  EXPECT_EQ(group_refusal(&BufferGroup::name, std::string(257, 'n')),
            "geometry: group name has 257 bytes, at most 256 allowed");
}

TEST(GeometryTest, RefusesNamesThatDoNotTellGroupsApart) {
  EXPECT_EQ(group_refusal(&BufferGroup::name, std::string{}),
            "geometry: group name \"\" is not made of letters, digits, _ and -");
  EXPECT_NE(group_refusal(&BufferGroup::name, std::string{"a.b"}), "");
  EXPECT_EQ(group_refusal(&BufferGroup::name, std::string{"Draft-kv_2"}), "");
  EXPECT_EQ(refusal([](Geometry& changed) { changed.groups.push_back(group()); }),
            "geometry: groups 0 and 1 are both named kv");
}

TEST(GeometryTest, RefusesValuesThatAreNoEnumerators) {
  EXPECT_EQ(group_refusal(&BufferGroup::element_type, static_cast<ElementType>(8)),
            "geometry: group kv: element_type 8 is not known");
  EXPECT_EQ(group_refusal(&BufferGroup::order, static_cast<PageOrder>(0)),
            "geometry: group kv: order 0 is not known");
}

TEST(GeometryTest, RefusesStridesThatMakeBytesFallTogether) {
  EXPECT_EQ(group_refusal<std::uint64_t>(&BufferGroup::page_stride, 512), "");
  EXPECT_EQ(group_refusal<std::uint64_t>(&BufferGroup::page_stride, 511),
            "geometry: group kv: page_stride is 511, but what it steps over takes 512 bytes");
  EXPECT_EQ(group_refusal<std::uint64_t>(&BufferGroup::head_stride, 15),
            "geometry: group kv: head_stride is 15, but what it steps over takes 16 bytes");
  EXPECT_EQ(group_refusal<std::uint64_t>(&BufferGroup::token_stride, 63),
            "geometry: group kv: token_stride is 63, but what it steps over takes 64 bytes");
  // Wider tokens no longer fit the packed page.
  EXPECT_EQ(group_refusal<std::uint64_t>(&BufferGroup::token_stride, 80),
            "geometry: group kv: page_stride is 512, but what it steps over takes 624 bytes");
}

TEST(GeometryTest, AcceptsGapsAndHeadsThatStepOverPages) {
  const auto strides = [](PageOrder order, std::uint64_t token, std::uint64_t head,
                          std::uint64_t page) {
    return refusal([&](Geometry& changed) {
      changed.groups[0].order = order;
      changed.groups[0].token_stride = token;
      changed.groups[0].head_stride = head;
      changed.groups[0].page_stride = page;
    });
  };
  EXPECT_EQ(strides(PageOrder::token_major, 100, 20, 1000), "");
  EXPECT_EQ(strides(PageOrder::token_major, 64, 16, 1024), "");     // K and V in turns
  EXPECT_EQ(strides(PageOrder::head_major, 16, 128 * 5, 128), "");  // [head][page][token]
  EXPECT_EQ(strides(PageOrder::token_major, 16, 128, 512),
            "geometry: group kv: order is token_major, but token_stride is 16 and head_stride 128");
  EXPECT_EQ(strides(PageOrder::head_major, 64, 16, 512),
            "geometry: group kv: order is head_major, but token_stride is 64 and head_stride 16");
}

TEST(GeometryTest, RefusesOffsetsThatWrap) {
  EXPECT_NE(group_refusal(&BufferGroup::page_stride, kMax64), "");
  EXPECT_NE(group_refusal(&BufferGroup::page_stride, kMax64 / 4), "");
  EXPECT_NE(group_refusal(&BufferGroup::token_stride, kMax64), "");
  EXPECT_NE(group_refusal(&BufferGroup::head_stride, kMax64), "");
  EXPECT_EQ(group_refusal(&BufferGroup::page_count, kMax32), "");
  EXPECT_EQ(refusal([](Geometry& changed) {
              changed.groups[0].heads = changed.groups[0].head_bytes = changed.groups[0].page_size =
                  kMax32;
            }),
            "geometry: group kv: page_size 4294967295 x heads 4294967295 x head_bytes 4294967295 "
            "is above 2^63 bytes");
}

TEST(GeometryTest, ChecksThePoolsBuffers) {
  std::byte memory{};
  Pool pool{.geometry = geometry(), .buffers = {{&memory, &memory, &memory, &memory}}};
  EXPECT_TRUE(validate(pool));
  pool.buffers[0][2] = nullptr;
  EXPECT_EQ(validate(pool).error().message, "pool: buffer 2 of group kv is null");
  pool.buffers[0].pop_back();
  EXPECT_EQ(validate(pool).error().message, "pool: group kv has 3 buffers, 2 layers x 2 need 4");
  pool.buffers.clear();
  EXPECT_EQ(validate(pool).error().message, "pool: buffers of 0 groups, the geometry has 1");
  pool.geometry.groups.clear();
  EXPECT_EQ(validate(pool).error().message, "geometry: 0 groups, 1 to 16 allowed");
}

// acceptance 19
TEST(GeometryTest, NamesTheFirstFieldThatDiffersWithBothValues) {
  const auto difference = [](auto change) {
    Geometry decode = geometry();
    change(decode);
    const Status status = check_compatible(geometry(), decode);
    if (status) return std::string{};
    EXPECT_EQ(status.error().code, ErrorCode::failed_precondition);
    return status.error().message;
  };
  const auto in_group = [&](auto field, auto value) {
    return difference([&](Geometry& decode) { decode.groups[0].*field = value; });
  };
  EXPECT_EQ(difference([](Geometry& g) { g.model_id = "other"; }),
            "geometry differs: model_id is tiny on prefill and other on decode");
  EXPECT_EQ(in_group(&BufferGroup::name, "mla"),
            "geometry differs: groups is 1 (kv) on prefill and 1 (mla) on decode");
  EXPECT_EQ(difference([](Geometry& g) {
              g.groups.push_back(group());
              g.groups[1].name = "idx";
            }),
            "geometry differs: groups is 1 (kv) on prefill and 2 (kv, idx) on decode");
  EXPECT_EQ(in_group(&BufferGroup::layers, 3U),
            "geometry differs: kv.layers is 2 on prefill and 3 on decode");
  EXPECT_EQ(in_group(&BufferGroup::buffers_per_layer, 1U),
            "geometry differs: kv.buffers_per_layer is 2 on prefill and 1 on decode");
  EXPECT_EQ(in_group(&BufferGroup::element_type, ElementType::f16),
            "geometry differs: kv.element_type is bf16 on prefill and f16 on decode");
  EXPECT_EQ(in_group(&BufferGroup::heads, 2U),
            "geometry differs: kv.heads is 4 on prefill and 2 on decode");
  EXPECT_EQ(in_group(&BufferGroup::head_bytes, 8U),
            "geometry differs: kv.head_bytes is 16 on prefill and 8 on decode");
  EXPECT_EQ(in_group(&BufferGroup::table, 1U),
            "geometry differs: kv.table is 0 on prefill and 1 on decode");
  EXPECT_EQ(in_group(&BufferGroup::page_size, 12U),
            "geometry differs: kv.page_size is 8 on prefill and 12 on decode: neither divides the "
            "other");
  // Totals are compared, not what of them a rank holds.
  EXPECT_EQ(difference([](Geometry& g) {
              g.groups[0].layers = 1;
              g.groups[0].total_layers = 3;
            }),
            "geometry differs: kv.layers is 2 on prefill and 3 on decode");
  EXPECT_EQ(difference([](Geometry& g) {
              g.groups[0].layers = 1;
              g.groups[0].total_layers = 2;
              g.groups[0].heads = 3;
              g.groups[0].total_heads = 4;
              g.groups[0].page_size = 4;
              g.groups[0].parts = 3;
              g.groups[0].part = 2;
              g.groups[0].interleave = 1;
            }),
            "");
  // What may differ: how the bytes lie.
  EXPECT_EQ(difference([](Geometry& g) {
              g.groups[0].order = PageOrder::head_major;
              g.groups[0].page_stride = 4096;
              g.groups[0].page_count = 99;
            }),
            "");
}

TEST(GeometryTest, DescribesWhatARankHasInCommonWithItsSide) {
  const std::vector<std::pair<std::string, std::string>> expected{
      {"model_id", "tiny"},        {"groups", "1 (kv)"},
      {"kv.layers", "6"},          {"kv.buffers_per_layer", "2"},
      {"kv.element_type", "bf16"}, {"kv.heads", "8"},
      {"kv.head_bytes", "16"},     {"kv.table", "0"},
      {"kv.page_size", "8"},       {"kv.parts", "2"},
      {"kv.interleave", "8"}};
  Geometry rank = geometry();
  rank.ranks = 12;
  rank.groups[0].total_layers = 6;
  rank.groups[0].total_heads = 8;
  rank.groups[0].parts = 2;
  EXPECT_EQ(describe(rank), expected);
  rank.rank = 11;
  rank.groups[0].first_layer = 4;
  rank.groups[0].first_head = 4;
  rank.groups[0].part = 1;
  rank.groups[0].interleave = 8;  // the page, and so by page
  rank.groups[0].order = PageOrder::head_major;
  rank.groups[0].page_count = 77;
  EXPECT_EQ(describe(rank), expected);
  rank.groups[0].interleave = 4;
  EXPECT_EQ(describe(rank).back().second, "4");
}

TEST(GeometryTest, AShareIsAPartOfTheWhole) {
  const auto share = [](auto... settings) {
    return refusal([&](Geometry& changed) { (settings(changed.groups[0]), ...); });
  };
  const auto set = [](auto field, std::uint32_t value) {
    return [=](BufferGroup& changed) { changed.*field = value; };
  };
  EXPECT_EQ(share(set(&BufferGroup::first_head, 4), set(&BufferGroup::total_heads, 8)), "");
  EXPECT_EQ(share(set(&BufferGroup::first_head, 5), set(&BufferGroup::total_heads, 8)),
            "geometry: group kv: first_head 5 and heads 4 leave the 8 of total_heads");
  EXPECT_EQ(share(set(&BufferGroup::first_head, 1)),
            "geometry: group kv: first_head 1 and heads 4 leave the 4 of total_heads");
  EXPECT_EQ(share(set(&BufferGroup::total_heads, 3)),
            "geometry: group kv: first_head 0 and heads 4 leave the 3 of total_heads");
  EXPECT_NE(share(set(&BufferGroup::first_head, kMax32), set(&BufferGroup::total_heads, 8)), "");
  EXPECT_EQ(share(set(&BufferGroup::first_layer, 5), set(&BufferGroup::total_layers, 6)),
            "geometry: group kv: first_layer 5 and layers 2 leave the 6 of total_layers");
  // Another stage holds the group.
  EXPECT_EQ(share(set(&BufferGroup::layers, 0), set(&BufferGroup::total_layers, 6)), "");

  EXPECT_EQ(share(set(&BufferGroup::parts, 4), set(&BufferGroup::part, 3)), "");
  EXPECT_EQ(share(set(&BufferGroup::parts, 4), set(&BufferGroup::part, 4)),
            "geometry: group kv: part 4 is not below parts 4");
  EXPECT_EQ(share(set(&BufferGroup::parts, 0)), "geometry: group kv: parts is 0");
  EXPECT_EQ(share(set(&BufferGroup::parts, 2), set(&BufferGroup::interleave, 4)), "");
  EXPECT_EQ(share(set(&BufferGroup::parts, 2), set(&BufferGroup::interleave, 3)),
            "geometry: group kv: interleave 3 does not divide page_size 8");
  EXPECT_EQ(share(set(&BufferGroup::parts, 2), set(&BufferGroup::interleave, 16)),
            "geometry: group kv: interleave 16 does not divide page_size 8");
  EXPECT_EQ(share(set(&BufferGroup::interleave, 3)), "");  // of one part, and so ignored

  EXPECT_EQ(refusal([](Geometry& changed) { changed.rank = 1; }),
            "geometry: rank 1 is not below ranks 1");
}

TEST(GeometryTest, GroupsOfATableAgreeOnWhatAPageIs) {
  const auto second = [](auto change) {
    return refusal([&](Geometry& changed) {
      changed.groups.push_back(group());
      changed.groups[1].name = "idx";
      change(changed.groups[1]);
    });
  };
  EXPECT_EQ(second([](BufferGroup& idx) { idx.heads = 1; }), "");
  EXPECT_EQ(second([](BufferGroup& idx) { idx.page_size = 16; }),
            "geometry: groups kv and idx share table 0, but page_size is 8 and 16");
  EXPECT_EQ(second([](BufferGroup& idx) { idx.parts = 2; }),
            "geometry: groups kv and idx share table 0, but parts is 1 and 2");
  EXPECT_EQ(second([](BufferGroup& idx) {
              idx.parts = 2;
              idx.table = 1;
            }),
            "");
}

TEST(GeometryTest, NamesItsEnumerators) {
  EXPECT_EQ(to_string(ElementType::f8_e4m3), "f8_e4m3");
  EXPECT_EQ(to_string(PageOrder::head_major), "head_major");
}

}  // namespace
}  // namespace kvshard
