#include "slot_copy.cuh"

#include <algorithm>
#include <limits>

namespace kvshard::kernels {
namespace {

// Chosen by measurement on an H200: docs/benchmarks-gpu.md, "Choices".
// More in flight is slower, and most so for scattered writes.
constexpr int kGatherThreads = 128;
constexpr int kGatherUnroll = 2;
constexpr int kScatterThreads = 256;
constexpr int kScatterUnroll = 1;
constexpr int kPullThreads = 128;
constexpr int kPullUnroll = 2;
constexpr int kCappedThreads = 1024;  // one block fills a multiprocessor, so that blocks count them
constexpr int kCappedUnroll = 4;
constexpr BulkShape kBulk{.tile_bytes = 8192, .stages = 3, .warps = 8, .behind = 1};
constexpr std::uint64_t kMinBulkRowBytes = 1024;  // smaller rows cost more to start than to move
constexpr std::uint32_t kChecksumBlocks =
    4096;  // a warp adds to its slot once: fewer take more chunks
constexpr int kSumThreads = 256;
constexpr std::uint32_t kSumBlocks = 256;  // that read one slot again

template <Move kMove, bool kChecksum>
constexpr auto* kBulkKernel =
    bulk_copy_kernel<kMove, kChecksum, kBulk.tile_bytes, kBulk.stages, kBulk.warps, kBulk.behind>;

template <typename Params>
cudaError_t launch(void (*kernel)(Params), std::uint64_t blocks, std::uint32_t rows,
                   std::uint32_t threads, std::uint32_t shared_bytes, const Params& params,
                   cudaStream_t stream) noexcept {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3{static_cast<unsigned>(blocks), rows};
  config.blockDim = dim3{threads};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess) (void)cudaGetLastError();  // clear only our own failure
  return error;
}

std::uint64_t blocks_for(std::uint64_t chunks, std::uint32_t warps,
                         std::uint32_t max_blocks) noexcept {
  const std::uint64_t blocks = std::max<std::uint64_t>(1, (chunks + warps - 1) / warps);
  return max_blocks == 0 ? blocks : std::min<std::uint64_t>(blocks, max_blocks);
}

// How a launch moves its bytes.
struct Plan {
  bool bulk;
  bool fused_checksum;
  std::uint32_t chunk_units;
};

template <bool kScatter>
constexpr int kThreads = kScatter ? kScatterThreads : kGatherThreads;
template <bool kScatter>
constexpr int kUnroll = kScatter ? kScatterUnroll : kGatherUnroll;

template <typename Unit, bool kScatter, bool kChecksum>
cudaError_t launch_copy(const SlotCopyParams& params, std::uint32_t max_sms,
                        cudaStream_t stream) noexcept {
  if (max_sms == 0)
    return launch(
        slot_copy_kernel<Unit, kScatter, kChecksum, kThreads<kScatter>, kUnroll<kScatter>>,
        blocks_for(params.chunks, kThreads<kScatter> / kWarpSize, kChecksum ? kChecksumBlocks : 0),
        1, kThreads<kScatter>, 0, params, stream);
  return launch(slot_copy_kernel<Unit, kScatter, kChecksum, kCappedThreads, kCappedUnroll>,
                blocks_for(params.chunks, kCappedThreads / kWarpSize, max_sms), 1, kCappedThreads,
                0, params, stream);
}

template <bool kScatter>
cudaError_t launch_copy(const SlotCopyArgs& args, const Plan& plan, const SlotCopyParams& params,
                        cudaStream_t stream) noexcept {
  constexpr Move kMove = kScatter ? Move::scatter : Move::gather;
  if (plan.bulk)
    return launch(plan.fused_checksum ? kBulkKernel<kMove, true> : kBulkKernel<kMove, false>,
                  blocks_for(params.chunks, kBulk.warps, args.max_sms), 1, kBulk.warps * kWarpSize,
                  bulk_shared_bytes(kBulk), params, stream);
  switch (args.unit_bytes) {
    case 16:
      return plan.fused_checksum
                 ? launch_copy<uint4, kScatter, true>(params, args.max_sms, stream)
                 : launch_copy<uint4, kScatter, false>(params, args.max_sms, stream);
    case 8:
      return launch_copy<uint2, kScatter, false>(params, args.max_sms, stream);
    case 4:
      return launch_copy<std::uint32_t, kScatter, false>(params, args.max_sms, stream);
    case 2:
      return launch_copy<std::uint16_t, kScatter, false>(params, args.max_sms, stream);
    case 1:
      return launch_copy<std::uint8_t, kScatter, false>(params, args.max_sms, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Once all segments are there. The guess for the last chunk stays below segment_count.
template <typename Params>
void finish(Params& params) noexcept {
  if (params.chunks == 0) return;
  const std::uint64_t segments = std::uint64_t{params.segment_count} << 32;
  params.segments_per_chunk = static_cast<std::uint32_t>((segments - 1) / params.chunks);
}

std::uint64_t fragments_bytes(const Fragments& f) noexcept {
  return std::uint64_t{f.buffer_count} * f.offset_count * f.outer * f.inner * f.row_bytes;
}

template <bool kScatter>
cudaError_t launch_slots(const SlotCopyArgs& args, cudaStream_t stream) noexcept {
  Plan plan{.bulk = args.bulk_copies && args.max_sms != 0 && args.unit_bytes == 16,
            .fused_checksum = false,
            .chunk_units = 0};
  bool any_checksum = false;
  for (std::uint32_t i = 0; i < args.piece_count; ++i)
    if (args.pieces[i].fragments.row_bytes < kMinBulkRowBytes) plan.bulk = false;
  for (std::uint32_t i = 0; i < args.slot_count; ++i)
    any_checksum = any_checksum || args.slots[i].sums != nullptr;
  plan.fused_checksum = any_checksum && args.unit_bytes == 16;
  plan.chunk_units = plan.bulk           ? kBulk.tile_bytes / 16
                     : args.max_sms != 0 ? kWarpSize * kCappedUnroll
                                         : kWarpSize * kUnroll<kScatter>;

  // Each launch takes the next pieces, and writes or reads the marks of the next slots.
  std::uint32_t piece = 0;
  for (std::uint32_t slot = 0; piece < args.piece_count || slot < args.slot_count;) {
    SlotCopyParams params{};
    for (; piece < args.piece_count && params.segment_count < kSegmentsPerLaunch; ++piece) {
      const SlotPiece& from = args.pieces[piece];
      const Slot& to = args.slots[from.slot];
      const std::uint64_t units = fragments_bytes(from.fragments) / args.unit_bytes;
      const std::uint64_t chunks = (units + plan.chunk_units - 1) / plan.chunk_units;
      if (units >= kMaxPieceUnits ||
          from.payload_offset / 8 > std::numeric_limits<std::uint32_t>::max())
        return cudaErrorInvalidValue;
      params.first_chunks[params.segment_count] = params.chunks;
      params.segments[params.segment_count++] = {
          .pool = Side::of(from.fragments, args.unit_bytes),
          .payload = to.address + kHeaderBytes + from.payload_offset,
          .sums = to.sums,
          .units = static_cast<std::uint32_t>(units),
          .first_word = static_cast<std::uint32_t>(from.payload_offset / 8)};
      params.chunks += static_cast<std::uint32_t>(chunks);
    }
    for (; slot < args.slot_count && params.slot_count < kSlotsPerLaunch; ++slot)
      params.slots[params.slot_count++] = args.slots[slot];
    finish(params);
    if (const auto error = launch_copy<kScatter>(args, plan, params, stream); error != cudaSuccess)
      return error;
  }
  if (!any_checksum) return cudaSuccess;
  for (std::uint32_t slot = 0; slot < args.slot_count;) {
    SealParams params{};
    for (; slot < args.slot_count && params.slot_count < kSlotsPerLaunch; ++slot)
      params.slots[params.slot_count++] = args.slots[slot];
    if (!plan.fused_checksum) {
      const std::uint32_t blocks = args.max_sms == 0 ? kSumBlocks : args.max_sms;
      if (const auto error = launch(sum_slots_kernel<kSumThreads>, blocks, params.slot_count,
                                    kSumThreads, 0, params, stream);
          error != cudaSuccess)
        return error;
    }
    if (const auto error = launch(seal_slots_kernel<kScatter>, params.slot_count, 1, kChecksumSums,
                                  0, params, stream);
        error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

template <typename Unit>
cudaError_t launch_pull(const PullParams& params, std::uint32_t max_sms,
                        cudaStream_t stream) noexcept {
  if (max_sms == 0)
    return launch(pull_kernel<Unit, kPullThreads, kPullUnroll>,
                  blocks_for(params.chunks, kPullThreads / kWarpSize, 0), 1, kPullThreads, 0,
                  params, stream);
  return launch(pull_kernel<Unit, kCappedThreads, kCappedUnroll>,
                blocks_for(params.chunks, kCappedThreads / kWarpSize, max_sms), 1, kCappedThreads,
                0, params, stream);
}

cudaError_t launch_pull(const PullArgs& args, bool bulk, const PullParams& params,
                        cudaStream_t stream) noexcept {
  if (bulk)
    return launch(kBulkKernel<Move::pull, false>,
                  blocks_for(params.chunks, kBulk.warps, args.max_sms), 1, kBulk.warps * kWarpSize,
                  bulk_shared_bytes(kBulk), params, stream);
  switch (args.unit_bytes) {
    case 16:
      return launch_pull<uint4>(params, args.max_sms, stream);
    case 8:
      return launch_pull<uint2>(params, args.max_sms, stream);
    case 4:
      return launch_pull<std::uint32_t>(params, args.max_sms, stream);
    case 2:
      return launch_pull<std::uint16_t>(params, args.max_sms, stream);
    case 1:
      return launch_pull<std::uint8_t>(params, args.max_sms, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

bool within(std::uint64_t offset, std::uint64_t bytes, const Fragments& side) noexcept {
  const std::uint64_t all = fragments_bytes(side);
  return offset <= all && bytes <= all - offset;
}

template <Move kMove, bool kChecksum>
cudaError_t allow_shared_memory() noexcept {
  return cudaFuncSetAttribute(kBulkKernel<kMove, kChecksum>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bulk_shared_bytes(kBulk)));
}

}  // namespace

cudaError_t launch_gather(const SlotCopyArgs& args, cudaStream_t stream) noexcept {
  return launch_slots<false>(args, stream);
}

cudaError_t launch_scatter(const SlotCopyArgs& args, cudaStream_t stream) noexcept {
  return launch_slots<true>(args, stream);
}

cudaError_t launch_pull(const PullArgs& args, cudaStream_t stream) noexcept {
  if (args.unit_bytes == 0) return cudaErrorInvalidValue;
  bool bulk = args.bulk_copies && args.max_sms != 0 && args.unit_bytes == 16;
  for (std::uint32_t i = 0; i < args.piece_count; ++i)
    bulk = bulk &&
           std::min(args.pieces[i].from.row_bytes, args.pieces[i].to.row_bytes) >= kMinBulkRowBytes;
  const std::uint32_t chunk_units = bulk                ? kBulk.tile_bytes / 16
                                    : args.max_sms != 0 ? kWarpSize * kCappedUnroll
                                                        : kWarpSize * kPullUnroll;
  for (std::uint32_t piece = 0; piece < args.piece_count;) {
    PullParams params{};
    for (; piece < args.piece_count && params.segment_count < kPullsPerLaunch; ++piece) {
      const PullPiece& pull = args.pieces[piece];
      if (!within(pull.from_offset, pull.bytes, pull.from) ||
          !within(pull.to_offset, pull.bytes, pull.to) ||
          std::max(pull.from_offset, pull.to_offset) + pull.bytes >=
              kMaxPieceUnits * args.unit_bytes)
        return cudaErrorInvalidValue;
      const auto units = [&](std::uint64_t bytes) {
        return static_cast<std::uint32_t>(bytes / args.unit_bytes);
      };
      params.first_chunks[params.segment_count] = params.chunks;
      params.segments[params.segment_count++] = {.from = Side::of(pull.from, args.unit_bytes),
                                                 .to = Side::of(pull.to, args.unit_bytes),
                                                 .from_unit = units(pull.from_offset),
                                                 .to_unit = units(pull.to_offset),
                                                 .units = units(pull.bytes)};
      params.chunks += (units(pull.bytes) + chunk_units - 1) / chunk_units;
    }
    if (params.chunks == 0) continue;
    finish(params);
    if (const auto error = launch_pull(args, bulk, params, stream); error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

cudaError_t prepare_bulk_copies() noexcept {
  for (const auto error :
       {allow_shared_memory<Move::gather, false>(), allow_shared_memory<Move::gather, true>(),
        allow_shared_memory<Move::scatter, false>(), allow_shared_memory<Move::scatter, true>(),
        allow_shared_memory<Move::pull, false>()})
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return error;
    }
  return cudaSuccess;
}

}  // namespace kvshard::kernels
