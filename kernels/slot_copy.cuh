#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "slot_copy.hpp"

// Device code of slot_copy.cu.
namespace kvshard::kernels {

inline constexpr int kWarpSize = 32;

/// Division of a number below 2^31 by multiplication (Granlund and Montgomery, 1994).
struct Divisor {
  std::uint32_t divisor;
  std::uint32_t magic;
  std::uint32_t shift;

  static Divisor of(std::uint64_t value) noexcept {
    // Above every dividend, all divisors give 0 and the dividend itself.
    const auto d = static_cast<std::uint32_t>(value < kMaxPieceUnits ? value : kMaxPieceUnits);
    std::uint32_t shift = 0;
    while ((std::uint64_t{1} << shift) < d) ++shift;
    const std::uint64_t magic =
        ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1;
    return {d, static_cast<std::uint32_t>(magic), shift};
  }
  /// Sets n to n % divisor and returns n / divisor.
  __device__ std::uint32_t divide(std::uint32_t& n) const {
    const std::uint32_t quotient = (__umulhi(n, magic) + n) >> shift;
    n -= quotient * divisor;
    return quotient;
  }
};

/// Fragments as the kernels walk them: counted in units.
struct Side {
  const std::uint64_t* buffers;
  const std::uint64_t* offsets;
  std::uint64_t outer_stride;
  std::uint64_t inner_stride;
  Divisor fragment_units;
  Divisor offset_count;
  Divisor row_units;
  Divisor inner;

  static Side of(const Fragments& f, std::uint32_t unit_bytes) noexcept {
    return {f.buffers,
            f.offsets,
            f.outer_stride,
            f.inner_stride,
            Divisor::of(std::uint64_t{f.outer} * f.inner * f.row_bytes / unit_bytes),
            Divisor::of(f.offset_count),
            Divisor::of(f.row_bytes / unit_bytes),
            Divisor::of(f.inner)};
  }
  /// The address of unit n.
  __device__ std::byte* locate(std::uint32_t n, std::uint32_t unit_bytes) const {
    std::uint32_t page = fragment_units.divide(n);
    const std::uint32_t buffer = offset_count.divide(page);
    std::uint64_t at = __ldg(buffers + buffer) + __ldg(offsets + page);
    if (row_units.divisor != fragment_units.divisor) {
      std::uint32_t row = row_units.divide(n);
      const std::uint32_t outer = inner.divide(row);
      at += outer * outer_stride + row * inner_stride;
    }
    return reinterpret_cast<std::byte*>(at + std::uint64_t{n} * unit_bytes);
  }
};

struct Segment {
  Side pool;
  std::byte* payload;   // where its first unit stands in the slot
  std::uint64_t* sums;  // of its slot; null for no checksum
  std::uint32_t units;
  std::uint32_t first_word;  // index of its first 64-bit word in the payload
};

// As many as the 4 KiB of a kernel's parameters hold. From there, every thread of a block reads the same
// words at the speed of a register.
inline constexpr std::uint32_t kSegmentsPerLaunch = 24;
inline constexpr std::uint32_t kSlotsPerLaunch = 24;

struct SlotCopyParams {
  std::uint32_t
      first_chunks[kSegmentsPerLaunch];  // of each segment; numbers run through all of them
  Segment segments[kSegmentsPerLaunch];
  Slot slots[kSlotsPerLaunch];
  std::uint32_t segment_count;
  std::uint32_t slot_count;
  std::uint32_t chunks;
  std::uint32_t segments_per_chunk;  // times 2^32, rounded down
};
static_assert(sizeof(SlotCopyParams) <= 4096);

struct PullSegment {
  Side from;
  Side to;
  std::uint32_t from_unit;  // where its first unit stands among those of `from`
  std::uint32_t to_unit;
  std::uint32_t units;
};
inline constexpr std::uint32_t kPullsPerLaunch = 22;
struct PullParams {
  std::uint32_t first_chunks[kPullsPerLaunch];
  PullSegment segments[kPullsPerLaunch];
  std::uint32_t segment_count;
  std::uint32_t chunks;
  std::uint32_t segments_per_chunk;  // times 2^32, rounded down
};
static_assert(sizeof(PullParams) <= 4096);

/// What a kernel does; the types of its parameters and segments follow.
enum class Move { gather, scatter, pull };
template <Move kMove>
struct MoveTypes {
  using Params = SlotCopyParams;
  using Segment = kernels::Segment;
};
template <>
struct MoveTypes<Move::pull> {
  using Params = PullParams;
  using Segment = PullSegment;
};

__device__ inline std::uint64_t checksum_term(std::uint64_t word, std::uint64_t index) {
  const std::uint64_t mixed = word ^ ((index + 1) * kChecksumStep);
  return (mixed & 0xffff'ffffULL) * (mixed >> 32) + (word << 32 | word >> 32);
}
__device__ inline std::uint64_t checksum_terms(uint4 value, std::uint64_t index) {
  return checksum_term(std::uint64_t{value.y} << 32 | value.x, index) +
         checksum_term(std::uint64_t{value.w} << 32 | value.z, index + 1);
}
__device__ inline std::uint64_t warp_sum(std::uint64_t value) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
    value += __shfl_xor_sync(0xffff'ffffU, value, lanes);
  return value;
}
__device__ inline void add_sum(std::uint64_t* sums, std::uint64_t value, std::uint32_t spread) {
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(sums + spread % kChecksumSums), value);
}

__device__ inline std::uint64_t padded_bytes(std::uint64_t payload_bytes) {
  return (payload_bytes + 15) / 16 * 16;
}
__device__ inline std::uint64_t* header_of(const Slot& slot) {
  return reinterpret_cast<std::uint64_t*>(slot.address);
}
__device__ inline std::uint64_t* trailer_of(const Slot& slot) {
  return header_of(slot) + (kHeaderBytes + padded_bytes(slot.payload_bytes)) / 8;
}

static_assert(kHeaderBytes == 2 * kMarkWords * 8);

/// Header, trailer and padding of every slot: written by gather, read by scatter. For one block.
template <bool kScatter>
__device__ void mark_slots(const SlotCopyParams& params) {
  for (std::uint32_t i = threadIdx.x; i < params.slot_count * kMarkWords; i += blockDim.x) {
    const Slot& slot = params.slots[i / kMarkWords];
    const std::uint32_t word = i % kMarkWords;
    if (kScatter) {
      slot.found->header[word] = header_of(slot)[word];
      slot.found->trailer[word] = trailer_of(slot)[word];
      continue;
    }
    std::uint64_t value = 0;
    if (word == 0) value = slot.lease;
    if (word == 1) value = slot.generation;
    if (word == 2) value = slot.chunk;
    if (word == 3) value = slot.payload_bytes;
    if (word == 5) value = kSlotMagic;
    header_of(slot)[word] = value;
    header_of(slot)[kMarkWords + word] = 0;
    trailer_of(slot)[word] = value;
    if (word == 0)
      for (auto* pad = slot.address + kHeaderBytes + slot.payload_bytes;
           pad < reinterpret_cast<std::byte*>(trailer_of(slot)); ++pad)
        *pad = std::byte{0};
  }
}

/// The segment of a chunk. Many segments of one launch tend to be alike, so that the search begins where it would
/// be if they were: a warp of a scatter moves 512 bytes, and feels each step.
template <typename Params>
__device__ std::uint32_t find_segment(const Params& params, std::uint32_t chunk) {
  if (params.segment_count == 1) return 0;
  std::uint32_t index = __umulhi(chunk, params.segments_per_chunk);
  while (params.first_chunks[index] > chunk) --index;
  while (index + 1 < params.segment_count && params.first_chunks[index + 1] <= chunk) ++index;
  return index;
}

/// One warp moves 32 * kUnroll consecutive units at a time, all of them on their way before the first is
/// stored. With no cap a warp has one such chunk, and the hardware balances them. Loads and stores are plain:
/// with no-allocate or evict-first hints the same kernel is 3 % slower over 2 GiB.
template <typename Unit, bool kScatter, bool kChecksum, int kThreads, int kUnroll>
__global__ __launch_bounds__(kThreads) void slot_copy_kernel(
    const __grid_constant__ SlotCopyParams params) {
  static_assert(!kChecksum || sizeof(Unit) == 16);
  constexpr std::uint32_t kWarps = kThreads / kWarpSize;
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  const std::uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  std::uint32_t index = 0;
  std::uint64_t sum = 0;
  for (std::uint32_t chunk = warp; chunk < params.chunks; chunk += gridDim.x * kWarps) {
    const std::uint32_t found = find_segment(params, chunk);
    if (kChecksum && found != index) {
      if (params.segments[index].sums != nullptr) add_sum(params.segments[index].sums, sum, warp);
      sum = 0;
    }
    index = found;
    const Segment& segment = params.segments[index];
    const std::uint32_t first = (chunk - params.first_chunks[index]) * kWarpSize * kUnroll + lane;
    Unit values[kUnroll];
    Unit* to[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const std::uint32_t n = first + k * kWarpSize;
      to[k] = nullptr;
      if (n >= segment.units) continue;
      auto* const pool = reinterpret_cast<Unit*>(segment.pool.locate(n, sizeof(Unit)));
      auto* const slot = reinterpret_cast<Unit*>(segment.payload) + n;
      values[k] = *(kScatter ? slot : pool);
      to[k] = kScatter ? pool : slot;
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (to[k] == nullptr) continue;
      *to[k] = values[k];
      if constexpr (kChecksum)
        sum += checksum_terms(values[k],
                              segment.first_word + 2 * std::uint64_t{first + k * kWarpSize});
    }
  }
  if (kChecksum && warp < params.chunks && params.segments[index].sums != nullptr)
    add_sum(params.segments[index].sums, sum, warp);
  if (blockIdx.x == gridDim.x - 1) mark_slots<kScatter>(params);
}

/// The same from page to page.
template <typename Unit, int kThreads, int kUnroll>
__global__ __launch_bounds__(kThreads) void pull_kernel(const __grid_constant__ PullParams params) {
  constexpr std::uint32_t kWarps = kThreads / kWarpSize;
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  const std::uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  for (std::uint32_t chunk = warp; chunk < params.chunks; chunk += gridDim.x * kWarps) {
    const std::uint32_t index = find_segment(params, chunk);
    const PullSegment& segment = params.segments[index];
    const std::uint32_t first = (chunk - params.first_chunks[index]) * kWarpSize * kUnroll + lane;
    Unit values[kUnroll];
    Unit* to[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const std::uint32_t n = first + k * kWarpSize;
      to[k] = nullptr;
      if (n >= segment.units) continue;
      values[k] =
          *reinterpret_cast<const Unit*>(segment.from.locate(segment.from_unit + n, sizeof(Unit)));
      to[k] = reinterpret_cast<Unit*>(segment.to.locate(segment.to_unit + n, sizeof(Unit)));
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      if (to[k] != nullptr) *to[k] = values[k];
  }
}

// Bulk copies of Hopper: the copy hardware moves rows to shared memory and on, and a single thread starts
// them. Few threads keep much in flight, which is what few multiprocessors need.
struct BulkShape {
  std::uint32_t tile_bytes;
  std::uint32_t stages;  // tiles in flight per warp
  std::uint32_t warps;
  std::uint32_t behind;  // stores that may still read their tile when the next load begins
};
__host__ __device__ constexpr std::uint32_t bulk_shared_bytes(const BulkShape& shape) {
  return shape.warps * shape.stages * (shape.tile_bytes + 8);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ inline void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void bulk_load(std::uint32_t to, const std::byte* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void bulk_store(std::byte* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ inline void bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

/// Here a chunk is a tile: bytes of one segment that follow each other in slot order, moved by one warp. Units
/// are 16 bytes.
template <Move kMove, bool kChecksum, std::uint32_t kTileBytes, std::uint32_t kStages,
          std::uint32_t kWarps, std::uint32_t kBehind>
__global__ __launch_bounds__(kWarps* kWarpSize) void bulk_copy_kernel(
    const __grid_constant__ typename MoveTypes<kMove>::Params params) {
  static_assert(kMove != Move::pull || !kChecksum);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte shared[];
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  const std::uint32_t warp_in_block = threadIdx.x / kWarpSize;
  // Warps that share a multiprocessor take tiles far apart, so that all multiprocessors are as busy.
  const std::uint32_t warp = warp_in_block * gridDim.x + blockIdx.x;
  const std::uint32_t step = gridDim.x * kWarps;
  const std::uint32_t tiles = shared_address(shared) + warp_in_block * kStages * kTileBytes;
  const std::uint32_t barriers =
      shared_address(shared) + kWarps * kStages * kTileBytes + warp_in_block * kStages * 8;
  if (lane < kStages) barrier_init(barriers + lane * 8);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();

  struct Tile {
    const typename MoveTypes<kMove>::Segment* segment;
    std::uint64_t begin;  // in the segment
    std::uint32_t bytes;
  };
  const auto tile_of = [&](std::uint32_t chunk, std::uint32_t& index) {
    index = find_segment(params, chunk);
    const auto& segment = params.segments[index];
    const std::uint64_t begin = std::uint64_t{chunk - params.first_chunks[index]} * kTileBytes;
    const std::uint64_t left = std::uint64_t{segment.units} * 16 - begin;
    return Tile{&segment, begin, left < kTileBytes ? static_cast<std::uint32_t>(left) : kTileBytes};
  };
  // Calls piece(pool, offset in the tile, bytes) for this lane's rows of a tile that begins with unit
  // `first_unit` of `pool`.
  const auto for_rows = [&](const Side& pool, std::uint32_t first_unit, std::uint32_t tile_bytes,
                            auto&& piece) {
    const std::uint32_t end_unit = first_unit + tile_bytes / 16;
    std::uint32_t in_row = first_unit;
    const std::uint32_t first_row = pool.row_units.divide(in_row);
    for (std::uint32_t row = first_row + lane;; row += kWarpSize) {
      const std::uint64_t row_begin = std::uint64_t{row} * pool.row_units.divisor;
      if (row_begin >= end_unit) return;
      const auto begin = row == first_row ? first_unit : static_cast<std::uint32_t>(row_begin);
      const std::uint64_t row_end = row_begin + pool.row_units.divisor;
      const auto end = row_end < end_unit ? static_cast<std::uint32_t>(row_end) : end_unit;
      piece(pool.locate(begin, 16), (begin - first_unit) * 16, (end - begin) * 16);
    }
  };
  const auto load = [&](std::uint32_t chunk, std::uint32_t stage, std::uint32_t& index) {
    const Tile tile = tile_of(chunk, index);
    const std::uint32_t barrier = barriers + stage * 8;
    const std::uint32_t to = tiles + stage * kTileBytes;
    const auto first_unit = static_cast<std::uint32_t>(tile.begin / 16);
    const auto load_row = [&](const std::byte* pool, std::uint32_t at, std::uint32_t bytes) {
      bulk_load(to + at, pool, bytes, barrier);
    };
    if (lane == 0) barrier_expect(barrier, tile.bytes);
    __syncwarp();
    if constexpr (kMove == Move::gather) {
      for_rows(tile.segment->pool, first_unit, tile.bytes, load_row);
    } else if constexpr (kMove == Move::pull) {
      for_rows(tile.segment->from, tile.segment->from_unit + first_unit, tile.bytes, load_row);
    } else {
      if (lane == 0) bulk_load(to, tile.segment->payload + tile.begin, tile.bytes, barrier);
    }
  };
  const auto store = [&](const Tile& tile, std::uint32_t from) {
    const auto first_unit = static_cast<std::uint32_t>(tile.begin / 16);
    const auto store_row = [&](std::byte* pool, std::uint32_t at, std::uint32_t bytes) {
      bulk_store(pool, from + at, bytes);
    };
    if constexpr (kMove == Move::scatter) {
      for_rows(tile.segment->pool, first_unit, tile.bytes, store_row);
    } else if constexpr (kMove == Move::pull) {
      for_rows(tile.segment->to, tile.segment->to_unit + first_unit, tile.bytes, store_row);
    } else {
      if (lane == 0) bulk_store(tile.segment->payload + tile.begin, from, tile.bytes);
    }
  };
  std::uint32_t load_index = 0;
  std::uint32_t next_load = warp;
  for (std::uint32_t stage = 0; stage < kStages && next_load < params.chunks; ++stage) {
    load(next_load, stage, load_index);
    next_load += step;
  }

  std::uint32_t index = 0;
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  std::uint32_t stored = 0;
  std::uint32_t free_stage = 0;
  std::uint64_t sum = 0;
  for (std::uint32_t chunk = warp; chunk < params.chunks; chunk += step) {
    const std::uint32_t before = index;
    const Tile tile = tile_of(chunk, index);
    if constexpr (kChecksum) {
      if (index != before) {
        if (params.segments[before].sums != nullptr)
          add_sum(params.segments[before].sums, sum, warp);
        sum = 0;
      }
    }
    barrier_wait(barriers + stage * 8, parity);
    store(tile, tiles + stage * kTileBytes);
    bulk_commit();
    if constexpr (kChecksum) {
      const auto* const words = reinterpret_cast<const uint4*>(
          shared + (std::size_t{warp_in_block} * kStages + stage) * kTileBytes);
      const std::uint64_t first_word = tile.segment->first_word + tile.begin / 8;
      for (std::uint32_t n = lane; n < tile.bytes / 16; n += kWarpSize)
        sum += checksum_terms(words[n], first_word + 2 * n);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (++stored > kBehind && next_load < params.chunks) {
      bulk_wait_read<kBehind>();
      __syncwarp();  // every lane's stores have read the tile, and every lane has summed it
      load(next_load, free_stage, load_index);
      next_load += step;
      if (++free_stage == kStages) free_stage = 0;
    }
  }
  if constexpr (kChecksum) {
    if (warp < params.chunks && params.segments[index].sums != nullptr)
      add_sum(params.segments[index].sums, sum, warp);
  }
  bulk_wait_all();
  if constexpr (kMove != Move::pull) {
    if (blockIdx.x == gridDim.x - 1) mark_slots<kMove == Move::scatter>(params);
  }
#endif
}

struct SealParams {
  Slot slots[kSlotsPerLaunch];
  std::uint32_t slot_count;
};

/// The sums of slots whose fragments are no whole words, so that no thread of the copy saw one: a second look
/// at the payload, by gridDim.x blocks for slot blockIdx.y.
template <int kThreads>
__global__ __launch_bounds__(kThreads) void sum_slots_kernel(
    const __grid_constant__ SealParams params) {
  const Slot& slot = params.slots[blockIdx.y];
  if (slot.sums == nullptr) return;
  const auto* const words = reinterpret_cast<const uint4*>(slot.address + kHeaderBytes);
  std::uint64_t sum = 0;
  for (std::uint64_t n = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
       n < padded_bytes(slot.payload_bytes) / 16; n += std::uint64_t{gridDim.x} * kThreads)
    sum += checksum_terms(words[n], 2 * n);
  add_sum(slot.sums, sum, (blockIdx.x * kThreads + threadIdx.x) / kWarpSize);
}

/// Adds the partial sums up and clears them for the next job; a warp for each slot.
template <bool kScatter>
__global__ void seal_slots_kernel(const __grid_constant__ SealParams params) {
  const Slot& slot = params.slots[blockIdx.x];
  if (slot.sums == nullptr) return;
  const std::uint64_t sum = warp_sum(slot.sums[threadIdx.x]);
  slot.sums[threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  if (kScatter) {
    slot.found->checksum = sum;
  } else {
    header_of(slot)[4] = sum;
    trailer_of(slot)[4] = sum;
  }
}

}  // namespace kvshard::kernels
