#include "kvshard/footprint.hpp"

#include <fmt/format.h>

namespace kvshard {

Result<Footprint> footprint(const PageLayout& layout, const FootprintRequest& request) {
  const auto pages = layout.pages_for(request.tokens);
  Footprint result;
  result.sharded.pages = layout.share(pages) + 1;
  result.unsharded.pages = pages + 1;
  bool wraps = pages + 1 == 0;
  for (auto* rank : {&result.sharded, &result.unsharded})
    wraps |= __builtin_mul_overflow(rank->pages, request.page_bytes, &rank->pool_bytes);
  auto& scratch = result.sharded.scratch_bytes;
  if (layout.shard_size() > 1) {
    wraps |= __builtin_mul_overflow(request.scratch_rows, request.scratch_row_bytes, &scratch);
    wraps |= __builtin_mul_overflow(scratch, std::uint64_t{2}, &scratch);
  }
  std::uint64_t total = 0;
  wraps |= __builtin_add_overflow(result.sharded.pool_bytes, scratch, &total);
  if (wraps)
    return Error{
        ErrorCode::invalid_argument,
        fmt::format(
            "{} tokens in pages of {} bytes, and {} scratch rows of {} bytes, exceed 64 bits",
            request.tokens, request.page_bytes, request.scratch_rows, request.scratch_row_bytes)};
  return result;
}

}  // namespace kvshard
