#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// How the bytes of one fragment lie in a pool buffer: `outer` x `inner` rows of `row_bytes` contiguous
/// bytes. Row (o, i) starts at o * outer_stride + i * inner_stride from the fragment's offset. In a slot
/// the same rows lie back to back, o-major. A whole contiguous page is {1, 0, 1, 0, page_bytes}; a head
/// slice of a token-major page has one outer row per token; a permuted pool swaps the strides.
/// Units: bytes.
struct FragmentShape {
  std::uint32_t outer{1};
  std::uint64_t outer_stride{0};
  std::uint32_t inner{1};
  std::uint64_t inner_stride{0};
  std::uint64_t row_bytes{0};

  [[nodiscard]] constexpr std::uint64_t bytes() const noexcept {
    return std::uint64_t{outer} * inner * row_bytes;
  }
  friend bool operator==(const FragmentShape&, const FragmentShape&) = default;
};

/// Fragments of one shape: the same offsets in each of several pool buffers (layers, K and V).
///
/// Shapes:  buffers.size() * offsets.size() fragments. In the slot they lie back to back, buffer-major:
///          all offsets of buffers[0], then all of buffers[1], ...
/// Units:   offsets in bytes from a buffer's start. One number per page, not per page and layer.
/// Owns:    nothing; the spans are borrowed until submit() returns.
struct FragmentBatch {
  std::span<std::byte* const> buffers;
  std::span<const std::uint64_t> offsets;
  FragmentShape shape;

  [[nodiscard]] constexpr std::uint64_t bytes() const noexcept {
    return buffers.size() * offsets.size() * shape.bytes();
  }
  /// Rows, however many of them happen to be neighbours.
  [[nodiscard]] constexpr std::uint64_t fragments() const noexcept {
    return buffers.size() * offsets.size() * shape.outer * shape.inner;
  }
};

/// Says whose bytes a slot holds. Gather writes it before and after the payload; scatter compares both.
struct SlotStamp {
  std::uint64_t lease{0};       ///< the pull on the prefill rank
  std::uint64_t generation{0};  ///< of the slot; rises each time it is given out
  std::uint64_t chunk{0};       ///< number of this piece within the lease
  std::uint64_t payload_bytes{0};

  friend bool operator==(const SlotStamp&, const SlotStamp&) = default;
};

/// A slot is a header, the payload, and a trailer at payload_bytes rounded up to 16 after the header.
/// Header and trailer hold the stamp (and the checksum, if asked for) as little-endian 64-bit words:
/// lease, generation, chunk, payload_bytes, checksum (0 when off), and a magic; then zeros. The header is
/// 128 bytes so that the payload of a 128-byte aligned slot begins a cache line of the GPU: on one
/// multiprocessor of an H200, a scatter from there moves 50 GB/s, from 64 bytes further on 42.
inline constexpr std::size_t kSlotHeaderBytes = 128;
inline constexpr std::size_t kSlotTrailerBytes = 64;

/// Bytes of a slot that hold a payload of `payload_bytes`, header and trailer included.
[[nodiscard]] constexpr std::uint64_t slot_bytes_for(std::uint64_t payload_bytes) noexcept {
  return kSlotHeaderBytes + (payload_bytes + 15) / 16 * 16 + kSlotTrailerBytes;
}

/// Hears that a copy ended. The object is borrowed from submit() until copy_done() runs, which happens
/// once, on the progress thread, after the last touch of the job's memory.
class CopyListener {
 public:
  virtual void copy_done(Status status) noexcept = 0;

 protected:
  ~CopyListener() = default;
};

/// Copies fragments between pool buffers and a slot, or from pool to pool.
///
/// A pull copies `sources`, which may be a peer's memory mapped here (pool_mapping.hpp), to `batches`. Byte i
/// of the one, in slot order, becomes byte i of the other; they need not be cut alike, only hold equally many
/// bytes. It has no slot, and so neither stamp nor checksum: whoever submits it knows that the sources are
/// final, and asks their owner afterwards whether they still were.
struct CopyJob {
  enum class Direction : std::uint8_t { gather, scatter, pull };

  Direction direction{Direction::gather};
  std::span<const FragmentBatch> batches;    ///< in slot order; borrowed until submit() returns
  std::span<const FragmentBatch> sources{};  ///< pull: likewise, apart from `batches`; else none
  std::byte* slot{
      nullptr};  ///< slot_bytes_for(payload) bytes, 16-byte aligned (128 is faster); borrowed until done
  SlotStamp stamp;  ///< written by gather; what scatter must find; of a pull, payload_bytes only
  bool checksum{false};  ///< compute (gather) or compare (scatter) while copying
  EventHandle after{
      nullptr};  ///< no byte of `batches` is touched before this event; borrowed until done
};

/// Holds a CUDA stream back for as long as it lives.
///
/// Threads: destroyed on any thread.
class StreamGate {
 public:
  virtual ~StreamGate() = default;
};

/// Gathers pages into slots, scatters slots into pages, and pulls pages from pages: the interface of the host
/// and CUDA engines.
///
/// Owns:    its streams, events and threads; never the memory it copies.
/// Threads: worker-bound, except wake_fd(), which does not change.
/// Errors:  submit() gives invalid_argument when batches or sources do not fit their stamp's payload_bytes,
///          and unsupported when `after` is set on an engine without CUDA; copy_done() gives data_loss when
///          a scatter finds another stamp or checksum (the destination then holds unspecified bytes).
/// Cost:    submit() does not allocate once warm. The host engine copies inside progress().
/// Source:  docs/architecture.md, "Copy engines".
class KVSHARD_EXPORT CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  /// The memory that its pools and slots must be in.
  [[nodiscard]] virtual MemoryKind memory_kind() const noexcept = 0;
  /// The CUDA device of its pools and slots; -1 for host memory.
  [[nodiscard]] virtual int device() const noexcept { return -1; }
  /// Takes the job, in order per engine; neighbours of one direction may run at once, so none may write what
  /// the other touches. `listener` hears the end from progress(), also of a job that fails. When submit()
  /// returns an error the listener is not called.
  virtual Status submit(const CopyJob& job, CopyListener& listener) = 0;
  /// Runs what is ready and calls listeners; returns how many jobs ended. Never waits for a device.
  virtual std::size_t progress() noexcept = 0;
  /// Jobs taken and not ended.
  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;
  /// Whether nothing need wait for `event` any more; none has fired always.
  [[nodiscard]] virtual bool fired(EventHandle event) const noexcept { return event == nullptr; }
  /// Enqueues a wait on `stream`: what is enqueued there later runs once the gate is gone, and sees what was
  /// copied before. Does not wait itself. Any thread; the engine outlives the gate.
  /// Errors: unsupported on an engine without CUDA; resource_exhausted when thousands of streams wait.
  virtual Result<std::unique_ptr<StreamGate>> hold(StreamHandle stream) {
    (void)stream;
    return Error{ErrorCode::unsupported, "a stream to hold back needs the CUDA copy engine"};
  }
  /// Becomes readable when progress() may have something to do, once arm() has said true; progress() clears
  /// it. -1: progress() must be polled while in_flight() > 0.
  [[nodiscard]] virtual int wake_fd() const noexcept = 0;
  /// Prepares wake_fd() for a wait. False: something ended meanwhile, call progress() instead.
  virtual bool arm() noexcept { return true; }
};

/// Memory for slots that an engine can copy to and from: one allocation, made at start.
///
/// Owns:    the memory, freed by the destructor.
/// Threads: thread-compatible.
class KVSHARD_EXPORT StagingMemory {
 public:
  virtual ~StagingMemory() = default;
  [[nodiscard]] virtual std::span<std::byte> bytes() const noexcept = 0;
  [[nodiscard]] virtual MemoryKind kind() const noexcept = 0;
};

struct CopyEngineOptions {
  MemoryKind memory{MemoryKind::host};
  std::uint32_t host_threads{1};   ///< host engine: threads that copy, the progress thread included
  int cuda_device{0};              ///< CUDA engine: the device of pools and slots
  std::uint32_t cuda_max_sms{0};   ///< CUDA engine: cap on multiprocessors used; 0 means no cap
  bool cuda_high_priority{false};  ///< CUDA engine: copy on a stream of the highest priority
};

/// The engine for `options.memory`; unsupported where this build or machine has none.
KVSHARD_EXPORT Result<std::unique_ptr<CopyEngine>> make_copy_engine(
    const CopyEngineOptions& options);
/// `bytes` of memory of that kind, aligned to a page of the machine at least.
KVSHARD_EXPORT Result<std::unique_ptr<StagingMemory>> make_staging_memory(MemoryKind kind,
                                                                          int cuda_device,
                                                                          std::size_t bytes);

}  // namespace kvshard
