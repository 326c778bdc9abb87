#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include "kvshard/geometry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard::bench {

/// The KV cache of a model that people run, as one rank of a tensor-parallel group of `tp` holds it.
struct ModelShape {
  std::string_view name;
  std::uint32_t layers;
  std::uint32_t buffers_per_layer;  ///< 2: K and V; 1: latent
  std::uint32_t heads;
  std::uint32_t head_elements;
  ElementType element_type;
  std::uint32_t element_bytes;

  [[nodiscard]] constexpr std::uint32_t head_bytes() const { return head_elements * element_bytes; }
};

std::span<const ModelShape> model_shapes();
/// Errors: invalid_argument listing the names.
Result<ModelShape> find_model(std::string_view name);

/// One pull measure, as the command line gives it and as rank processes are told it.
struct PullConfig {
  std::string model{"llama3-70b-tp8"};
  std::uint32_t layers{0};  // 0: all of the model
  std::uint32_t page_size{16};
  std::uint32_t tokens{4096};
  double fragmentation{1.0};  // share of pages that lie anywhere
  std::uint32_t prefill{1};   // page shards
  std::uint32_t prefill_tp{1};
  std::uint32_t decode_tp{1};
  std::uint32_t chunk_tokens{0};  // 0: all at once
  std::uint64_t slot_bytes{4U << 20};
  std::uint32_t slots{4};  // for each peer
  std::uint32_t window{2};
  std::uint64_t mapped_piece_bytes{0};  // 0: as a prefill rank has it
  std::uint32_t busy_poll_us{50};       // of ranks, and of the engine that waits for a pull
  std::uint32_t concurrency{1};
  std::string path{"auto"};
  std::string memory{"host"};
  std::uint32_t devices{1};  // GPUs that the ranks are spread over
  std::uint32_t repeat{20};
  std::uint32_t warmup{2};
  std::uint32_t page_operations{4096};  // at most so many single ones are timed; 0: none
  bool baselines{true};

  [[nodiscard]] std::uint32_t prefill_ranks() const { return prefill * prefill_tp; }
  [[nodiscard]] MemoryKind memory_kind() const {
    return memory == "cuda" ? MemoryKind::cuda : MemoryKind::host;
  }
  /// The GPU of a rank, or -1. Prefill and decode ranks are numbered each from 0, and decode ranks take
  /// the last GPUs, so that with enough of them no rank shares one.
  [[nodiscard]] int device(bool decode, std::uint32_t rank) const {
    if (memory_kind() == MemoryKind::host) return -1;
    return static_cast<int>(decode ? devices - 1 - rank % devices : rank % devices);
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PullConfig, model, layers, page_size, tokens, fragmentation,
                                   prefill, prefill_tp, decode_tp, chunk_tokens, slot_bytes, slots,
                                   window, mapped_piece_bytes, busy_poll_us, concurrency, path,
                                   memory, devices, repeat, warmup, page_operations, baselines)

}  // namespace kvshard::bench
