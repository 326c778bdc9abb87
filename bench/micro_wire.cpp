#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "wire/codec.hpp"

// What a message costs on the progress thread: READY comes once for each piece of up to a slot's size,
// PULL once for each request and rank.
namespace kvshard::wire {
namespace {

Pull make_pull() {
  return {.pull = 7,
          .room = RoomId{11},
          .window = 3,
          .wait_ms = 1500,
          .tables = {{.first_token = 128, .end_token = 131'072}}};
}

Ready make_ready() {
  return {.pull = 7,
          .lease = 9,
          .piece = 5,
          .slot = 1,
          .generation = 33,
          .payload_bytes = 16U << 20,
          .buffer_count = 128,
          .first_unit = 64,
          .unit_count = 16};
}

template <Message M>
void encode_loop(benchmark::State& state, const M& message) {
  std::vector<std::byte> out;
  encode(message, out);
  for (auto _ : state) {
    out.clear();
    encode(message, out);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(out.size()));
}

template <Message M>
void decode_loop(benchmark::State& state, const M& message) {
  std::vector<std::byte> frame;
  encode(message, frame);
  const auto payload = std::span<const std::byte>{frame}.subspan(kFrameHeaderBytes);
  if (!decode<M>(payload)) return state.SkipWithError("the message does not decode");
  for (auto _ : state) {
    auto decoded = decode<M>(payload);
    benchmark::DoNotOptimize(decoded);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(frame.size()));
}

void encode_pull(benchmark::State& state) {
  encode_loop(state, make_pull());
}
void decode_pull(benchmark::State& state) {
  decode_loop(state, make_pull());
}
void encode_ready(benchmark::State& state) {
  encode_loop(state, make_ready());
}
void decode_ready(benchmark::State& state) {
  decode_loop(state, make_ready());
}

BENCHMARK(encode_pull);
BENCHMARK(decode_pull);
BENCHMARK(encode_ready);
BENCHMARK(decode_ready);

}  // namespace
}  // namespace kvshard::wire

BENCHMARK_MAIN();
