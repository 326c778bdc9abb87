#include "kvshard/page_layout.hpp"

#include <fmt/format.h>

#include <limits>

#include "layout/cyclic_scan.hpp"

namespace kvshard {
namespace {

constexpr auto kMax32 = std::numeric_limits<std::uint32_t>::max();

constexpr ExactDivisor make_divisor(std::uint32_t number) noexcept {
  const auto shift = static_cast<std::uint32_t>(std::countr_zero(number));
  const auto odd = number >> shift;
  auto inverse = odd;  // right in 3 bits; each step doubles them
  for (int step = 0; step < 4; ++step) inverse *= 2 - odd * inverse;
  return {inverse, shift, kMax32 / number};
}

}  // namespace

PageLayout::PageLayout(std::uint32_t shard_size, std::uint32_t page_size) noexcept
    : shard_size_{shard_size}, page_size_{page_size}, divisor_{make_divisor(shard_size)} {}

Result<PageLayout> PageLayout::create(std::uint32_t shard_size, std::uint32_t page_size) {
  if (shard_size == 0) return Error{ErrorCode::invalid_argument, "shard_size is 0"};
  if (page_size == 0) return Error{ErrorCode::invalid_argument, "page_size is 0"};
  if (page_size > kMax32 / shard_size)
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("shard_size {} times page_size {} exceeds 32 bits", shard_size, page_size)};
  return PageLayout{shard_size, page_size};
}

Result<Position> PageLayout::next_position(std::uint64_t tokens) const {
  if (tokens % page_size_ != 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("an extension starts page-aligned: {} tokens are {} into a page of {}",
                             tokens, tokens % page_size_, page_size_)};
  if (tokens / page_size_ > kMax32)
    return Error{ErrorCode::invalid_argument, fmt::format("{} tokens exceed 2^32 pages", tokens)};
  return Position{static_cast<std::uint32_t>(tokens / page_size_)};
}

Status PageLayout::check_cyclic(std::span<const LogicalPage> pages, Position first) const {
  if (scan_cyclic(pages, *this)) return {};
  for (std::size_t k = 0; k < pages.size(); ++k) {
    const auto position = index(first) + k;
    if (is_padding(pages[k]))
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("page {} at position {} is padding: pages below {} are never handed out",
                      index(pages[k]), position, shard_size_)};
    const auto expected = owner_after(owner(pages[0]), k);
    if (owner(pages[k]) != expected)
      return Error{
          ErrorCode::invalid_argument,
          fmt::format("owners are not cyclic: page {} at position {} belongs to rank {}, the "
                      "chain goes on at rank {} of {}",
                      index(pages[k]), position, owner(pages[k]), expected, shard_size_)};
  }
  return Error{ErrorCode::internal, "the vector scan refused a cyclic chain"};
}

}  // namespace kvshard
