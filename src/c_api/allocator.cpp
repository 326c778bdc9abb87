#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "c_api/boundary.hpp"
#include "kvshard/page_allocator.hpp"

using namespace kvshard;
using namespace kvshard::c_api;

struct kvshard_allocator {
  PageAllocator pages;
};

namespace {

void copy_pages(const std::vector<LogicalPage>& from, std::uint32_t* to) {
  std::transform(from.begin(), from.end(), to, [](LogicalPage page) { return index(page); });
}

/// Pages of a draw, before they are drawn. What no pool can hold is refused before memory is taken.
Result<std::vector<LogicalPage>> undrawn(const kvshard_allocator* allocator,
                                         const std::uint32_t* pages, std::uint64_t count) {
  KVSHARD_TRY(required(allocator, "allocator"));
  KVSHARD_TRY(required_array(pages, count, "pages"));
  return std::vector<LogicalPage>(std::min(count, allocator->pages.total_pages() + 1));
}

}  // namespace

int32_t kvshard_allocator_create(uint32_t shard_size, uint32_t page_size, uint32_t pages_per_rank,
                                 int32_t order, kvshard_allocator** allocator,
                                 kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(allocator, "allocator"));
    KVSHARD_TRY(const FreeOrder free_order,
                to_enum(order, FreeOrder::last_freed_first, FreeOrder::ascending, "order"));
    KVSHARD_TRY(const PageLayout layout, PageLayout::create(shard_size, page_size));
    KVSHARD_TRY(auto made, PageAllocator::create(layout, pages_per_rank, free_order));
    *allocator = new kvshard_allocator{std::move(made)};
    return {};
  });
}

void kvshard_allocator_destroy(kvshard_allocator* allocator) {
  delete allocator;
}

int32_t kvshard_allocator_draw_chain(kvshard_allocator* allocator, uint32_t* pages,
                                     uint64_t page_count, uint32_t* base, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(base, "base"));
    KVSHARD_TRY(auto drawn, undrawn(allocator, pages, page_count));
    KVSHARD_TRY(*base, allocator->pages.draw_chain(drawn));
    copy_pages(drawn, pages);
    return {};
  });
}

int32_t kvshard_allocator_extend(kvshard_allocator* allocator, uint32_t base,
                                 uint32_t first_position, uint32_t* pages, uint64_t page_count,
                                 kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(auto drawn, undrawn(allocator, pages, page_count));
    KVSHARD_TRY(allocator->pages.extend(base, Position{first_position}, drawn));
    copy_pages(drawn, pages);
    return {};
  });
}

int32_t kvshard_allocator_free(kvshard_allocator* allocator, const uint32_t* pages,
                               uint64_t page_count, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(allocator, "allocator"));
    KVSHARD_TRY(const auto chain, to_pages<LogicalPage>(pages, page_count));
    return allocator->pages.free_chain(chain);
  });
}

int32_t kvshard_allocator_admit(const kvshard_allocator* allocator, uint64_t pages,
                                kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(allocator, "allocator"));
    return allocator->pages.admit(pages);
  });
}

uint64_t kvshard_allocator_admissible_pages(const kvshard_allocator* allocator) {
  return allocator != nullptr ? allocator->pages.admissible_pages() : 0;
}
uint64_t kvshard_allocator_charge_pages(const kvshard_allocator* allocator, uint64_t pages) {
  return allocator != nullptr ? allocator->pages.charge_pages(pages) : 0;
}
uint64_t kvshard_allocator_used_pages(const kvshard_allocator* allocator) {
  return allocator != nullptr ? allocator->pages.used_pages() : 0;
}
uint32_t kvshard_allocator_free_pages(const kvshard_allocator* allocator, uint32_t shard_rank) {
  return allocator != nullptr ? allocator->pages.free_pages(shard_rank) : 0;
}
