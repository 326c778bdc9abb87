#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/plan.hpp"
#include "wire/samples.hpp"

namespace {

using namespace kvshard;

// A HELLO whose geometry is the input's.
Result<wire::Hello> hello_with(std::span<const std::byte> geometry) {
  wire::Hello empty = wire::sample_hello();
  const auto sample = wire::frame_of(empty);
  // What stands before the geometry and behind it does not depend on it.
  constexpr std::size_t kBefore = 4 + 2 + 2 + 8 + (2 + 2) + 8 + 4 + 4 + (2 + 3);
  constexpr std::size_t kBehind = 8 + 4;
  const auto payload = wire::payload_of(sample);
  std::vector<std::byte> bytes{payload.begin(), payload.begin() + kBefore};
  bytes.insert(bytes.end(), geometry.begin(), geometry.end());
  bytes.insert(bytes.end(), payload.end() - kBehind, payload.end());
  return wire::decode<wire::Hello>(bytes);
}

// A plan's cost grows with layers, heads and page sizes; a peer's declaration may be large, a fuzzer's is not.
bool small(const Geometry& geometry) {
  return std::ranges::all_of(geometry.groups, [](const BufferGroup& group) {
    return group.layers <= 64 && group.heads <= 64 && group.page_size <= 256 && group.parts <= 16;
  });
}

}  // namespace

// libFuzzer's entry for geometries as a peer declares them, two at a time: what is decoded must be valid, and
// what is said to be compatible must give lanes that cover each head of each layer that decode holds once.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::size_t first = std::min<std::size_t>(data[0] + 256U * (data[1] % 4U), size - 2);
  const auto bytes = std::as_bytes(std::span{data + 2, size - 2});
  const auto prefill = hello_with(bytes.first(first));
  const auto decode = hello_with(bytes.subspan(first));
  for (const auto* hello : {&prefill, &decode}) {
    if (hello->ok() && !validate((*hello)->geometry)) std::abort();
  }
  if (!prefill || !decode) return 0;
  const Geometry& from = prefill->geometry;
  const Geometry& to = decode->geometry;
  (void)describe(from);
  if (!check_compatible(from, to) || !small(from) || !small(to)) return 0;
  const auto lanes = assign_lanes(std::array{from}, to);
  if (!lanes) return 0;
  const auto plan = TransferPlan::create(from, to, lanes->front());
  if (!plan) return 0;
  for (const TransferPlan::Table& table : plan->tables())
    (void)plan->unit_bytes(table.first_buffer, table.buffer_count);
  return 0;
}
