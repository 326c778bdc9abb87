#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Gather and scatter between scattered pages and contiguous slots, and the page-to-page pull. Host side:
// plain data and launchers. A launcher enqueues on the stream given and returns: it does not wait, allocate,
// log, or choose a device, and so it can be captured in a CUDA graph.
namespace kvshard::kernels {

/// The same fragments in each of several buffers. In a slot they lie back to back, buffer-major; within a
/// fragment, `outer` x `inner` rows of `row_bytes`, outer-major. Row (o, i) starts at
/// buffers[b] + offsets[p] + o * outer_stride + i * inner_stride.
///
/// Units: bytes. No count is 0.
struct Fragments {
  const std::uint64_t* buffers;  ///< device: `buffer_count` device addresses
  const std::uint64_t* offsets;  ///< device: `offset_count` offsets
  std::uint32_t buffer_count;
  std::uint32_t offset_count;
  std::uint32_t outer;
  std::uint32_t inner;
  std::uint64_t outer_stride;
  std::uint64_t inner_stride;
  std::uint64_t row_bytes;
};

inline constexpr std::uint32_t kMarkWords =
    8;  ///< 64-bit words of a slot's header, and of its trailer
inline constexpr std::uint32_t kHeaderBytes = 128;  ///< from a slot's start to its payload
inline constexpr std::uint32_t kChecksumSums = 32;  ///< partial sums per slot
inline constexpr std::uint64_t kSlotMagic = 0x3130'746f'6c73'766bULL;  ///< "kvslot01"
inline constexpr std::uint64_t kChecksumStep = 0x9e37'79b9'7f4a'7c15ULL;

/// What a scatter found around the payload; whoever reads it compares.
struct SlotFound {
  std::uint64_t header[kMarkWords];
  std::uint64_t trailer[kMarkWords];
  std::uint64_t checksum;  ///< of the bytes; only where the slot has `sums`
};

/// A slot: header (a mark, then zeros), payload, zeros up to 16 bytes, trailer (a mark).
struct Slot {
  std::byte* address;  ///< device; 16-byte aligned, better 128
  std::uint64_t lease;
  std::uint64_t generation;
  std::uint64_t chunk;
  std::uint64_t payload_bytes;
  std::uint64_t* sums;  ///< device: kChecksumSums words, 0 before and after; null for no checksum
  SlotFound* found;     ///< device or pinned host: written by scatter; null for gather
};

/// Fragments that fill a part of a slot's payload.
struct SlotPiece {
  Fragments fragments;
  std::uint32_t slot;            ///< index in SlotCopyArgs::slots
  std::uint64_t payload_offset;  ///< of their first byte
};

/// Many small copies, or a large one, in one launch.
struct SlotCopyArgs {
  const SlotPiece* pieces;  ///< host; read before the launcher returns, as are the slots
  std::uint32_t piece_count;
  const Slot* slots;
  std::uint32_t slot_count;
  std::uint32_t unit_bytes;  ///< 16, 8, 4, 2 or 1: divides every address, offset, stride and row
  std::uint32_t max_sms;     ///< multiprocessors used at most; 0 for no cap
  bool bulk_copies;          ///< the device has them (compute capability 9.0 and up)
};

/// A piece holds fewer units than this.
inline constexpr std::uint64_t kMaxPieceUnits = std::uint64_t{1} << 31;

/// Copies fragments into slots, and writes header, trailer, padding and checksum.
cudaError_t launch_gather(const SlotCopyArgs& args, cudaStream_t stream) noexcept;
/// Copies slots into fragments, and reports header, trailer and checksum in Slot::found.
cudaError_t launch_scatter(const SlotCopyArgs& args, cudaStream_t stream) noexcept;

/// Bytes that go from page to page, with no slot between. Each side names them by their place in the slot
/// order of its own fragments, so that the sides need not be cut alike.
struct PullPiece {
  Fragments from;  ///< may be a peer's memory, mapped here
  Fragments to;
  std::uint64_t from_offset;  ///< of the first byte, in `from`
  std::uint64_t to_offset;
  std::uint64_t bytes;
};

struct PullArgs {
  const PullPiece* pieces;  ///< host; read before the launcher returns
  std::uint32_t piece_count;
  std::uint32_t
      unit_bytes;  ///< as above, of both sides; divides the offsets and bytes of a piece too
  std::uint32_t max_sms;
  bool bulk_copies;
};
/// cudaErrorInvalidValue for a piece that ends beyond one of its sides.
cudaError_t launch_pull(const PullArgs& args, cudaStream_t stream) noexcept;

/// Per-block dynamic shared memory above 48 KiB has to be allowed once for each device, which no launcher
/// does: call this with the device current before the first launch with bulk_copies.
cudaError_t prepare_bulk_copies() noexcept;

}  // namespace kvshard::kernels
