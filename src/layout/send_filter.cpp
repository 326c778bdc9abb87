#include "kvshard/send_filter.hpp"

#include <fmt/format.h>

#include <limits>

#include "base/try.hpp"

namespace kvshard {
namespace {

template <typename Number>
std::size_t compress(std::span<const Number> numbers, std::span<Run> out) noexcept {
  std::size_t runs = 0;
  for (std::size_t at = 0; at < numbers.size(); ++runs) {
    Run run{index(numbers[at]), 1, 1};
    const auto next = at + 1;
    if (next < numbers.size() && index(numbers[next]) > run.first) {
      run.stride = index(numbers[next]) - run.first;
      while (at + run.count < numbers.size() &&
             index(numbers[at + run.count]) > index(numbers[at + run.count - 1]) &&
             index(numbers[at + run.count]) - index(numbers[at + run.count - 1]) == run.stride)
        ++run.count;
    }
    if (runs < out.size()) out[runs] = run;
    at += run.count;
  }
  return runs;
}

}  // namespace

Result<SendFilter> SendFilter::create(const PageLayout& layout, std::uint32_t shard_rank) {
  if (shard_rank >= layout.shard_size())
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("shard_rank {} is not below shard_size {}", shard_rank, layout.shard_size())};
  return SendFilter{layout, shard_rank};
}

Result<OwnedPages> SendFilter::select(std::span<const LogicalPage> chunk, Position first,
                                      std::span<LocalPage> out) const {
  if (chunk.size() > std::numeric_limits<std::uint32_t>::max() - index(first))
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("{} pages from position {} exceed 32 bits", chunk.size(), index(first))};
  const auto shard_size = layout_.shard_size();
  OwnedPages owned;
  owned.positions = {index(first), shard_size, 0};
  if (chunk.empty()) return owned;

  // Every id is divided here, all at once. What follows may then step from one owned id to the
  // next: the check has found owner(chunk[k]) == owner_after(owner(chunk[0]), k) for every k.
  KVSHARD_TRY(layout_.check_cyclic(chunk, first));
  const auto start = layout_.owner(chunk[0]);
  const auto offset = layout_.steps(start, shard_rank_);
  const auto count = layout_.share(chunk.size(), offset);
  if (count > out.size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("rank {} owns {} of {} pages, room for {}", shard_rank_, count,
                             chunk.size(), out.size())};
  const auto& divisor = layout_.divisor();
  const auto* from = chunk.data() + offset;
  for (std::size_t i = 0; i < count; ++i)
    out[i] = LocalPage{divisor.quotient(index(from[i * shard_size]) - shard_rank_)};

  owned.pages = out.first(count);
  owned.positions.count = static_cast<std::uint32_t>(count);
  if (count != 0) owned.positions.first += offset;
  owned.base = layout_.steps(index(first) % shard_size, start);
  return owned;
}

std::size_t to_runs(std::span<const LocalPage> numbers, std::span<Run> out) noexcept {
  return compress(numbers, out);
}
std::size_t to_runs(std::span<const Position> numbers, std::span<Run> out) noexcept {
  return compress(numbers, out);
}

}  // namespace kvshard
