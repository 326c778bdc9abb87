#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kvshard/page_allocator.hpp"

namespace kvshard {
namespace {

using Pages = std::vector<LogicalPage>;

constexpr std::uint32_t kPagesPerRank = 40;
constexpr int kSteps = 100'000;

struct Chain {
  std::uint32_t base{0};
  std::uint32_t first{0};  // position of pages[0]: the head may have been freed
  Pages pages;
};

// N replicas that hear the same calls, and a model that knows which pages are out.
class Replay {
 public:
  Replay(std::uint32_t shard_size, std::uint32_t page_size, FreeOrder order, std::uint32_t seed)
      : layout_{PageLayout::create(shard_size, page_size).value()}, random_{seed} {
    for (std::uint32_t r = 0; r < shard_size; ++r)
      replicas_.push_back(PageAllocator::create(layout_, kPagesPerRank, order).value());
    out_.resize(first().total_pages() + shard_size, false);
  }

  void step() {
    switch (random_() % 10) {
      case 0:
      case 1:
        draw_chain();
        break;
      case 2:
      case 3:
        extend();
        break;
      case 4:
        draw_batch();
        break;
      case 5:
      case 6:
        free_whole();
        break;
      case 7:
        free_part();
        break;
      case 8:
        misuse();
        break;
      default:
        group();
        break;
    }
  }

  // Equal state everywhere, no page lost.
  void compare() {
    const auto state = first().snapshot();
    for (const auto& replica : replicas_) ASSERT_EQ(replica.snapshot(), state);
    const auto out = static_cast<std::uint64_t>(std::count(out_.begin(), out_.end(), true));
    ASSERT_EQ(first().used_pages(), out);
  }

  void finish() {
    if (group_open_) group_end();
    while (!chains_.empty()) free_at(0, chains_[0].first, chains_[0].pages.size());
    compare();
    ASSERT_EQ(first().total_free_pages(), first().total_pages());
    for (std::uint32_t rank = 0; rank < layout_.shard_size(); ++rank)
      ASSERT_EQ(first().free_pages(rank), kPagesPerRank);
  }

  std::uint64_t drawn{0};
  std::uint64_t refused{0};

 private:
  PageAllocator& first() { return replicas_[0]; }

  // The same call on every replica must end the same way; then its pages go to `pages`.
  bool on_all(Pages& pages, const std::function<Status(PageAllocator&, Pages&)>& call) {
    std::vector<Pages> results(replicas_.size(), pages);
    const auto status = call(replicas_[0], results[0]);
    for (std::size_t r = 1; r < replicas_.size(); ++r) {
      EXPECT_EQ(call(replicas_[r], results[r]).ok(), status.ok());
      EXPECT_EQ(results[r], results[0]);
    }
    pages = results[0];
    if (!status) ++refused;
    return status.ok();
  }

  void take(const Pages& pages, std::uint32_t base, std::uint32_t position) {
    for (std::size_t k = 0; k < pages.size(); ++k) {
      ASSERT_FALSE(layout_.is_padding(pages[k]));
      ASSERT_LT(index(pages[k]), out_.size());
      ASSERT_FALSE(out_[index(pages[k])]) << "page " << index(pages[k]) << " was drawn twice";
      ASSERT_EQ(layout_.owner(pages[k]), (base + position + k) % layout_.shard_size());
      out_[index(pages[k])] = true;
    }
    drawn += pages.size();
  }

  std::uint32_t fullest() {
    std::uint32_t best = 0;
    for (std::uint32_t rank = 1; rank < layout_.shard_size(); ++rank)
      if (first().free_pages(rank) > first().free_pages(best)) best = rank;
    return best;
  }

  void draw_chain() {
    Chain chain;
    chain.pages.resize(random_() % 30);
    const auto expected = fullest();
    const bool admitted = first().admit(chain.pages.size()).ok();
    const bool done = on_all(chain.pages, [&](PageAllocator& allocator, Pages& pages) -> Status {
      const auto base = allocator.draw_chain(pages);
      if (!base) return base.error();
      EXPECT_EQ(*base, expected);
      return {};
    });
    if (!done) {
      ASSERT_FALSE(admitted) << "admission promised what the draw refused";
      return;
    }
    chain.base = expected;
    take(chain.pages, chain.base, 0);
    if (!chain.pages.empty()) chains_.push_back(std::move(chain));
  }

  void extend() {
    if (chains_.empty()) return;
    auto& chain = chains_[random_() % chains_.size()];
    const auto position = chain.first + static_cast<std::uint32_t>(chain.pages.size());
    Pages pages(random_() % 12);
    if (!on_all(pages, [&](PageAllocator& allocator, Pages& to) {
          return allocator.extend(chain.base, Position{position}, to);
        }))
      return;
    take(pages, chain.base, position);
    chain.pages.insert(chain.pages.end(), pages.begin(), pages.end());
  }

  void draw_batch() {
    const std::size_t a = 1 + random_() % 10;
    const std::size_t b = 1 + random_() % 10;
    Pages pages(a + b);
    if (!on_all(pages, [&](PageAllocator& allocator, Pages& to) {
          const DrawSegment batch[]{{{}, Position{0}, std::span{to}.first(a)},
                                    {{}, Position{0}, std::span{to}.subspan(a)}};
          return allocator.draw(batch);
        }))
      return;
    for (const auto& part : {Pages(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(a)),
                             Pages(pages.begin() + static_cast<std::ptrdiff_t>(a), pages.end())}) {
      take(part, layout_.owner(part[0]), 0);
      chains_.push_back({layout_.owner(part[0]), 0, part});
    }
  }

  void free_whole() {
    if (chains_.empty()) return;
    const auto at = random_() % chains_.size();
    free_at(at, chains_[at].first, chains_[at].pages.size());
  }

  // The head or the tail of a chain, as a window or an eviction would.
  void free_part() {
    if (chains_.empty()) return;
    const auto at = random_() % chains_.size();
    const auto& chain = chains_[at];
    const auto count = random_() % chain.pages.size();
    const bool head = random_() % 2 == 0;
    const auto skip = head ? 0 : chain.pages.size() - count;
    free_at(at, chain.first + static_cast<std::uint32_t>(skip), count);
  }

  void free_at(std::size_t at, std::uint32_t position, std::size_t count) {
    auto& chain = chains_[at];
    const auto skip = static_cast<std::ptrdiff_t>(position - chain.first);
    const auto end = skip + static_cast<std::ptrdiff_t>(count);
    Pages pages(chain.pages.begin() + skip, chain.pages.begin() + end);
    ASSERT_TRUE(on_all(pages, [&](PageAllocator& allocator, Pages& from) {
      const FreeSegment segment{chain.base, Position{position}, from};
      return allocator.free({&segment, 1});
    }));
    for (const auto page : pages) out_[index(page)] = false;
    chain.pages.erase(chain.pages.begin() + skip, chain.pages.begin() + end);
    if (skip == 0) chain.first += static_cast<std::uint32_t>(count);
    if (chain.pages.empty()) {
      std::swap(chain, chains_.back());
      chains_.pop_back();
    }
  }

  void misuse() {
    Pages pages{LogicalPage{static_cast<std::uint32_t>(random_() % (out_.size() + 20))}};
    if (index(pages[0]) < out_.size() && out_[index(pages[0])]) return;
    ASSERT_FALSE(on_all(
        pages, [](PageAllocator& allocator, Pages& from) { return allocator.free_chain(from); }));
  }

  void group() {
    if (group_open_) {
      group_end();
      return;
    }
    for (auto& replica : replicas_) ASSERT_TRUE(replica.begin_free_group());
    group_open_ = true;
  }
  void group_end() {
    for (auto& replica : replicas_) ASSERT_TRUE(replica.end_free_group());
    group_open_ = false;
  }

  PageLayout layout_;
  std::mt19937 random_;
  std::vector<PageAllocator> replicas_;
  std::vector<bool> out_;
  std::vector<Chain> chains_;
  bool group_open_{false};
};

class PageAllocatorReplayTest
    : public testing::TestWithParam<std::tuple<std::uint32_t, FreeOrder>> {};

// acceptance 6: the same 10^5 random calls on N replicas.
TEST_P(PageAllocatorReplayTest, ReplicasStayEqualAndNoPageIsLostOrDrawnTwice) {
  const auto [shard_size, order] = GetParam();
  constexpr std::uint32_t kSeed = 20240607;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Replay replay{shard_size, 16, order, kSeed};
  for (int step = 0; step < kSteps; ++step) {
    replay.step();
    if (step % 500 == 0) replay.compare();
    ASSERT_FALSE(HasFailure()) << "at step " << step;
  }
  replay.finish();
  EXPECT_GT(replay.drawn, 100'000U);
  EXPECT_GT(replay.refused, 1'000U);
}

INSTANTIATE_TEST_SUITE_P(
    EveryShardSize, PageAllocatorReplayTest,
    testing::Combine(testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 16),
                     testing::Values(FreeOrder::last_freed_first, FreeOrder::ascending)),
    [](const auto& param) {
      return "N" + std::to_string(std::get<0>(param.param)) +
             (std::get<1>(param.param) == FreeOrder::ascending ? "Ascending" : "LastFreedFirst");
    });

// Whatever is promised together can be drawn together, from any fragmentation and in any order.
TEST(PageAllocatorAdmissionTest, PromisesWithinTheChargeAreAlwaysDrawn) {
  std::mt19937 random{17};
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    for (const std::uint32_t page_size : {1, 2, 16, 64, 128})
      for (int round = 0; round < 60; ++round) {
        const auto layout = PageLayout::create(shard_size, page_size).value();
        auto allocator = PageAllocator::create(layout, 30).value();
        Pages some(1);
        for (std::uint32_t i = 0; i < 20; ++i)  // uneven owners
          (void)allocator.extend(static_cast<std::uint32_t>(random()) % shard_size, Position{0},
                                 some);
        ASSERT_EQ(allocator.admissible_tokens(), allocator.admissible_pages() * page_size);
        std::vector<Pages> promised;
        std::uint64_t charged = 0;
        for (;;) {
          Pages pages(1 + random() % 25);
          charged += allocator.charge_pages(pages.size());
          if (charged > allocator.admissible_pages()) break;
          promised.push_back(std::move(pages));
        }
        for (auto& pages : promised) {
          ASSERT_LE(std::uint64_t{shard_size} * layout.share(pages.size()),
                    allocator.charge_pages(pages.size()) - 1);
          const auto base = allocator.draw_chain(pages);
          ASSERT_TRUE(base) << base.error().message;
        }
      }
}

// A K-page chain takes K / N pages from each owner, give or take one; every K to several rounds.
TEST(PageAllocatorAdmissionTest, EveryOwnerGivesItsShare) {
  for (const std::uint32_t shard_size : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    for (std::uint32_t count = 0; count <= 4 * shard_size; ++count)
      for (std::uint32_t base = 0; base < shard_size; ++base) {
        const auto layout = PageLayout::create(shard_size, 1).value();
        auto allocator = PageAllocator::create(layout, 5).value();
        Pages pages(count);
        ASSERT_TRUE(allocator.extend(base, Position{0}, pages));
        ASSERT_TRUE(layout.check_cyclic(pages));
        for (std::uint32_t rank = 0; rank < shard_size; ++rank) {
          const auto given = 5 - allocator.free_pages(rank);
          ASSERT_GE(given, count / shard_size);
          ASSERT_LE(given, (count + shard_size - 1) / shard_size);
        }
      }
}

}  // namespace
}  // namespace kvshard
