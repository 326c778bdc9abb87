#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/decode_rank.hpp"
#include "support/model_pools.hpp"

// A request that is cut in one way over the prefill ranks and in another over the decode ranks. Each process makes
// the same of it from the same seeds. Only one table here; reshard_test has the other cases, on the host.
namespace kvshard::test {

struct ReshardCase {
  std::string name;
  std::vector<Geometry> prefill, decode;
  std::uint64_t tokens{0};
  std::uint64_t held{0};  // tokens that decode has already
};

inline std::vector<ReshardCase> reshard_cases() {
  using Cut = BufferGroup (*)(BufferGroup, std::uint32_t rank, std::uint32_t count);
  const Cut whole = [](BufferGroup group, std::uint32_t, std::uint32_t) { return group; };
  const Cut heads = [](BufferGroup group, std::uint32_t rank, std::uint32_t count) {
    group.total_heads = group.heads;
    group.heads = std::max(1U, group.total_heads / count);
    group.first_head = rank * group.total_heads / count;
    return group;
  };
  const Cut pages = [](BufferGroup group, std::uint32_t rank, std::uint32_t count) {
    group.parts = count;
    group.part = rank;
    return group;
  };
  const Cut tokens = [](BufferGroup group, std::uint32_t rank, std::uint32_t count) {
    group.parts = count;
    group.part = rank;
    group.interleave = 1;
    return group;
  };
  const auto side = [](const BufferGroup& group, Cut cut, std::uint32_t count) {
    std::vector<Geometry> made;
    for (std::uint32_t rank = 0; rank < count; ++rank)
      made.push_back(
          {.model_id = "model", .groups = {cut(group, rank, count)}, .rank = rank, .ranks = count});
    return made;
  };
  const BufferGroup gqa{.name = "kv",
                        .layers = 4,
                        .buffers_per_layer = 2,
                        .heads = 8,
                        .head_bytes = 8,
                        .page_size = 16,
                        .page_count = 40};
  BufferGroup head_major = gqa;
  head_major.order = PageOrder::head_major;
  const BufferGroup mla16{.name = "latent",
                          .layers = 3,
                          .buffers_per_layer = 1,
                          .heads = 1,
                          .head_bytes = 24,
                          .page_size = 16,
                          .page_count = 40};
  BufferGroup mla64 = mla16;
  mla64.page_size = 64;
  return {
      // acceptance 11
      {"Heads8Tp2To4", side(gqa, heads, 2), side(gqa, heads, 4), 16 * 9},
      {"Heads8Tp4To2", side(gqa, heads, 4), side(gqa, heads, 2), 16 * 9},
      // acceptance 12
      {"LatentFourShardsToTp1", side(mla16, pages, 4), side(mla16, whole, 1), 16 * 9},
      {"LatentFourShardsToTp2", side(mla16, pages, 4), side(mla16, whole, 2), 16 * 9},
      {"LatentFourShardsToTp4", side(mla16, pages, 4), side(mla16, whole, 4), 16 * 9},
      // acceptance 13
      {"EightShardsTo3", side(mla16, pages, 8), side(mla16, pages, 3), 16 * 27},
      // acceptance 14
      {"Page16To64", side(mla16, pages, 2), side(mla64, whole, 1), 200, 64},
      // acceptance 15
      {"TokenMajorToHeadMajor", side(gqa, heads, 2), side(head_major, heads, 4), 16 * 9},
      // acceptance 16
      {"Interleave2By1ToOne", side(mla64, tokens, 2), side(mla64, whole, 1), 64 * 20},
      {"OneToInterleave2By1", side(gqa, whole, 1), side(gqa, tokens, 2), 16 * 16, 32},
      // acceptance 4: and the prefix ends within a page
      {"HeadSlicesOverPageShards", side(gqa, pages, 4), side(gqa, heads, 2), 16 * 11, 37},
  };
}

inline constexpr std::uint64_t kReshardRequest = 77;

/// The request's pages on one side.
struct ReshardPages {
  ReshardPages(const std::vector<Geometry>& side, std::uint64_t length, std::uint64_t seed)
      : span{side.front().groups[0].page_span()},
        table{TablePages::draw(side.front().groups[0], (length + span - 1) / span, seed)},
        tokens{table.pages.size() * span} {}
  static ReshardPages of_prefill(const ReshardCase& which) {
    return {which.prefill, which.tokens, 31};
  }
  static ReshardPages of_decode(const ReshardCase& which) {
    return {which.decode, which.tokens, 62};
  }

  /// Those of them, from `first` on, that the rank with `group` has.
  [[nodiscard]] std::vector<LocalPage> own(const BufferGroup& group, std::uint32_t first) const {
    std::vector<LocalPage> own;
    for (std::size_t p = first; p < table.pages.size(); ++p) {
      if (group.stripe() != group.page_size) {
        own.push_back(LocalPage{index(table.pages[p])});
      } else if (index(table.pages[p]) % group.parts == group.part) {
        own.push_back(LocalPage{index(table.pages[p]) / group.parts});
      }
    }
    return own;
  }

  std::uint64_t span;  // tokens that a position stands for
  TablePages table;
  std::uint64_t tokens;  // in whole pages
};

}  // namespace kvshard::test
