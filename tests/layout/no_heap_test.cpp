// Counts what this binary allocates, to show that the hot calls of the layout layer allocate
// nothing.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <span>
#include <vector>

#include "kvshard/bootstrap.hpp"
#include "kvshard/page_allocator.hpp"
#include "kvshard/plan.hpp"
#include "kvshard/prefix_chains.hpp"
#include "kvshard/send_filter.hpp"

namespace {
std::atomic<std::size_t> allocations{0};
}  // namespace

// Not inlined: gcc would see free() called on memory from operator new, and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc{};
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size == 0 ? 1 : size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kvshard {
namespace {

TEST(NoHeapTest, HotCallsAllocateNothing) {
  const auto layout = PageLayout::create(4, 16).value();
  for (const auto order : {FreeOrder::last_freed_first, FreeOrder::ascending}) {
    auto allocator = PageAllocator::create(layout, 1000, order).value();
    PrefixChains chains{layout};
    chains.reserve(4);
    const auto filter = SendFilter::create(layout, 1).value();
    const auto check = CapacityCheck::create(layout, 16000, {AdmissionRule::normal()}).value();
    std::vector<LogicalPage> chain(2000);
    std::vector<LogicalPage> tail(300);
    std::vector<LogicalPage> mirror(300);
    std::vector<LocalPage> owned(2000);
    std::vector<kvshard::Run> runs(2000);

    const auto before = allocations.load();
    bool good = true;
    for (int round = 0; round < 3; ++round) {
      const auto base = allocator.draw_chain(chain);
      good = good && base && allocator.extend(*base, Position{2000}, tail);
      good = good && check.check_now(100, allocator.admissible_tokens()) && allocator.admit(8);
      good = good && allocator.draw_matching(tail, mirror);
      const auto sent = filter.select(chain, Position{0}, owned);
      good = good && sent && to_runs(sent->pages, runs) > 0;
      const auto head = chains.add(chain);
      const auto rest = chains.join(*head, tail);
      const auto half = chains.split(*head, 1000);
      good = good && rest && half && chains.remove(*head) && chains.remove(*rest) &&
             chains.remove(*half);
      good = good && allocator.free_chain(mirror);
      good = good && allocator.begin_free_group() && allocator.free_chain(chain) &&
             allocator.free_chain(tail) && allocator.end_free_group();
    }
    EXPECT_EQ(allocations.load(), before);
    EXPECT_TRUE(good);
    EXPECT_EQ(allocator.used_pages(), 0U);
  }
}

TEST(NoHeapTest, UnitsOfARequestAllocateOncePerTable) {
  BufferGroup prefill{.layers = 1, .heads = 1, .head_bytes = 1, .page_size = 16, .parts = 4};
  BufferGroup decode{.layers = 1, .heads = 1, .head_bytes = 1, .page_size = 64};
  const auto tokens = TokenMap::create(prefill, decode).value();
  std::vector<LocalPage> pages(1000);
  std::vector<std::uint64_t> offsets(1000);

  const auto before = allocations.load();
  const UnitList units = tokens.units(3, 0);
  EXPECT_LE(allocations.load() - before, 1U);
  const auto after = allocations.load();
  const auto range = units.range(100, 64000);
  const auto count = range.end - range.first;
  units.offsets(Side::prefill, range.first, pages, 0, 16, 1, std::span{offsets}.first(count));
  units.offsets(Side::decode, range.first, pages, 0, 64, 1, std::span{offsets}.first(count));
  units.token_offsets(Side::decode, 3, 1, pages, 0, 64, 1, std::span{offsets}.first(15));
  EXPECT_EQ(units.first_in_prefill_page(5), 5U);
  EXPECT_EQ(allocations.load(), after);
  EXPECT_EQ(count, 999U);
}

TEST(NoHeapTest, TheCountSeesAllocations) {
  const auto before = allocations.load();
  ::operator delete(::operator new(10));  // called as functions, so not optimised away
  EXPECT_GT(allocations.load(), before);
}

}  // namespace
}  // namespace kvshard
