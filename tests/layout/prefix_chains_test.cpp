#include "kvshard/prefix_chains.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kvshard/page_allocator.hpp"

namespace kvshard {
namespace {

using Pages = std::vector<LogicalPage>;

PageLayout layout_of(std::uint32_t shard_size) {
  return PageLayout::create(shard_size, 16).value();
}

// Pages of a chain that starts at `base`; `local` only makes them differ.
Pages chain_of(const PageLayout& layout, std::uint32_t base, std::size_t pages,
               std::uint32_t local = 1) {
  Pages chain;
  for (std::size_t k = 0; k < pages; ++k)
    chain.push_back(layout.logical(layout.owner_after(base, k), LocalPage{local++}));
  return chain;
}

TEST(PrefixChainsTest, RemembersTheBaseThatThePagesHave) {
  const auto layout = layout_of(4);
  PrefixChains chains{layout};
  const auto id = chains.add(chain_of(layout, 3, 6)).value();
  EXPECT_EQ(chains.base(id).value(), 3U);
  EXPECT_EQ(chains.pages(id).value(), 6U);
  EXPECT_EQ(chains.next_owner(id).value(), 1U);
  EXPECT_EQ(chains.size(), 1U);
}

TEST(PrefixChainsTest, RefusesAGraftUnderAnotherBaseWhole) {
  const auto layout = layout_of(4);
  PrefixChains chains{layout};
  const auto parent = chains.add(chain_of(layout, 3, 6)).value();
  const auto child = chains.join(parent, chain_of(layout, 1, 5, 20)).value();
  EXPECT_EQ(chains.base(child).value(), 1U);

  const auto grafted = chains.join(parent, chain_of(layout, 2, 5, 40));
  ASSERT_FALSE(grafted);
  EXPECT_EQ(grafted.error().code, ErrorCode::failed_precondition);
  EXPECT_NE(grafted.error().message.find(
                "of base 3 and 6 pages goes on at rank 1, page 162 is of rank 2"),
            std::string::npos)
      << grafted.error().message;
  EXPECT_EQ(chains.append(child, chain_of(layout, 3, 1)).error().code,
            ErrorCode::failed_precondition);
  EXPECT_EQ(chains.size(), 2U);
  EXPECT_EQ(chains.pages(parent).value(), 6U);
  EXPECT_EQ(chains.pages(child).value(), 5U);
}

// acceptance 9: offered to a prefix cache.
TEST(PrefixChainsTest, RefusesPagesThatAreNotCyclic) {
  const auto layout = layout_of(4);
  PrefixChains chains{layout};
  auto bad = chain_of(layout, 3, 6);
  std::swap(bad[4], bad[5]);
  EXPECT_NE(chains.add(bad).error().message.find("at position 4"), std::string::npos);
  const auto id = chains.add(chain_of(layout, 2, 1)).value();
  EXPECT_EQ(chains.join(id, bad).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(chains.append(id, bad).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(chains.add({}).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(chains.join(id, {}).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(chains.size(), 1U);
  EXPECT_EQ(chains.pages(id).value(), 1U);
}

TEST(PrefixChainsTest, SplitsOnlyInside) {
  const auto layout = layout_of(4);
  PrefixChains chains{layout};
  const auto id = chains.add(chain_of(layout, 3, 6)).value();
  EXPECT_EQ(chains.split(id, 0).error().code, ErrorCode::invalid_argument);
  EXPECT_EQ(chains.split(id, 6).error().message, "a chain of 6 pages cannot be split at 6");
  EXPECT_EQ(chains.size(), 1U);
}

TEST(PrefixChainsTest, AStaleIdIsFound) {
  const auto layout = layout_of(2);
  PrefixChains chains{layout};
  const auto id = chains.add(chain_of(layout, 0, 3)).value();
  ASSERT_TRUE(chains.remove(id));
  EXPECT_FALSE(chains.remove(id));
  const auto again = chains.add(chain_of(layout, 1, 3)).value();  // takes the same entry
  EXPECT_NE(again, id);
  EXPECT_FALSE(chains.base(id));
  EXPECT_FALSE(chains.join(id, chain_of(layout, 1, 1)));
  EXPECT_FALSE(chains.base(ChainId{}));
  EXPECT_EQ(chains.size(), 1U);
}

// A tree of prefixes, as radix caches keep it: after any splits, every path from a root is one
// cyclic chain, and the next page drawn for it continues the rotation.
TEST(PrefixChainsPropertyTest, EveryPathStaysOneChain) {
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    std::mt19937 random{shard_size};
    const auto layout = layout_of(shard_size);
    PrefixChains chains{layout};
    auto allocator = PageAllocator::create(layout, 2000).value();
    struct Node {
      ChainId id{};
      Pages path;  // from the root to the end of this node
      std::size_t own{0};
    };
    std::vector<Node> nodes;
    for (int step = 0; step < 400; ++step) {
      Pages pages(1 + random() % 9);
      if (nodes.empty() || random() % 8 == 0) {
        ASSERT_TRUE(allocator.draw_chain(pages));
        nodes.push_back({chains.add(pages).value(), pages, pages.size()});
        continue;
      }
      const auto at = random() % nodes.size();
      if (random() % 3 == 0 && nodes[at].own > 1) {
        const auto keep = 1 + random() % (nodes[at].own - 1);
        const auto drop = nodes[at].own - keep;
        Node rest{chains.split(nodes[at].id, keep).value(), nodes[at].path, drop};
        nodes[at].path.resize(nodes[at].path.size() - drop);
        nodes[at].own = keep;
        nodes.push_back(rest);
        continue;
      }
      ASSERT_TRUE(allocator.extend(chains.next_owner(nodes[at].id).value(), Position{0}, pages));
      Node child{chains.join(nodes[at].id, pages).value(), nodes[at].path, pages.size()};
      child.path.insert(child.path.end(), pages.begin(), pages.end());
      nodes.push_back(child);
    }
    for (const auto& node : nodes) {
      ASSERT_TRUE(layout.check_cyclic(node.path));
      ASSERT_EQ(chains.pages(node.id).value(), node.own);
      ASSERT_EQ(chains.base(node.id).value(), layout.owner(node.path[node.path.size() - node.own]));
      ASSERT_EQ(chains.next_owner(node.id).value(),
                (layout.owner(node.path[0]) + node.path.size()) % shard_size);
    }
    const auto count = nodes.size();
    ASSERT_EQ(chains.size(), count);
    for (const auto& node : nodes) ASSERT_TRUE(chains.remove(node.id));
    ASSERT_EQ(chains.size(), 0U);
  }
}

}  // namespace
}  // namespace kvshard
