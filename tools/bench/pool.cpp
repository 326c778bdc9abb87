#include "bench/pool.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/try.hpp"
#include "bench/device.hpp"
#include "bench/pattern.hpp"

namespace kvshard::bench {
namespace {

constexpr int kCanary = 0xa5;

}  // namespace

Result<PatternPool> PatternPool::create(Geometry geometry, MemoryKind kind, int device) {
  KVSHARD_TRY(validate(geometry));
  const BufferGroup& group = geometry.groups[0];
  if (group.head_bytes % 8 != 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("head_bytes is {}, not a multiple of 8", group.head_bytes)};
  KVSHARD_TRY(auto memory,
              make_staging_memory(kind, std::max(device, 0),
                                  group.page_bytes() * group.page_count * group.buffers()));
  return PatternPool{std::move(geometry), std::move(memory)};
}

Pool PatternPool::describe() const {
  Pool pool{geometry_, {{}}};
  for (std::uint32_t b = 0; b < group().buffers(); ++b) pool.buffers[0].push_back(buffer(b).data());
  return pool;
}

template <typename Visit>
void PatternPool::each_row(std::uint32_t buffer, std::uint64_t content, const Visit& visit) const {
  const BufferGroup& group = this->group();
  RowPattern row{.content = content,
                 .buffer = group.first_layer * group.buffers_per_layer + buffer};
  std::size_t at = 0;
  for (row.token = 0; row.token < group.page_size; ++row.token) {
    for (std::uint32_t head = 0; head < group.heads; ++head, at += group.head_bytes) {
      row.head = group.first_head + head;
      visit(at, row);
    }
  }
}

void PatternPool::fill_page(std::span<std::byte> image, std::uint32_t buffer,
                            const PageContent& page) const {
  const auto bytes = image.subspan(index(page.page) * group().page_bytes(), group().page_bytes());
  each_row(buffer, page.content, [&](std::size_t at, const RowPattern& row) {
    row.fill(bytes.subspan(at, group().head_bytes));
  });
}

Status PatternPool::check_page(std::span<const std::byte> image, std::uint32_t buffer,
                               const PageContent& page) const {
  const auto bytes = image.subspan(index(page.page) * group().page_bytes(), group().page_bytes());
  Status status;
  each_row(buffer, page.content, [&](std::size_t at, const RowPattern& row) {
    if (status && !row.is_in(bytes.subspan(at, group().head_bytes))) {
      status = Error{ErrorCode::data_loss,
                     fmt::format("wrong bytes: page {}, buffer {}, token {}, head {}",
                                 index(page.page), row.buffer, row.token, row.head)};
    }
  });
  return status;
}

void PatternPool::fill_page(const PageContent& page) {
  for (std::uint32_t b = 0; b < group().buffers(); ++b) fill_page(buffer(b), b, page);
}

Status PatternPool::check_page(const PageContent& page) const {
  for (std::uint32_t b = 0; b < group().buffers(); ++b) KVSHARD_TRY(check_page(buffer(b), b, page));
  return {};
}

Status PatternPool::fill(std::span<const PageContent> pages) {
  std::vector<std::byte> image(buffer_bytes());
  for (std::uint32_t b = 0; b < group().buffers(); ++b) {
    std::memset(image.data(), kCanary, image.size());
    for (const PageContent& page : pages) fill_page(image, b, page);
    KVSHARD_TRY(copy_bytes(memory_->kind(), buffer(b).data(), image.data(), image.size()));
  }
  return {};
}

Status PatternPool::check(std::span<const PageContent> pages) const {
  std::vector<std::byte> image(buffer_bytes());
  std::vector<bool> filled(group().page_count);
  for (const PageContent& page : pages) filled[index(page.page)] = true;
  for (std::uint32_t b = 0; b < group().buffers(); ++b) {
    KVSHARD_TRY(copy_bytes(memory_->kind(), image.data(), buffer(b).data(), image.size()));
    for (const PageContent& page : pages) KVSHARD_TRY(check_page(image, b, page));
    for (std::uint32_t page = 0; page < group().page_count; ++page) {
      if (filled[page]) continue;
      const auto bytes =
          std::span{image}.subspan(page * group().page_bytes(), group().page_bytes());
      if (!std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{kCanary}; }))
        return Error{ErrorCode::data_loss,
                     fmt::format("page {}, buffer {} was written, and is of no request", page, b)};
    }
  }
  return {};
}

}  // namespace kvshard::bench
