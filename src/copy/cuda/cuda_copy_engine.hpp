#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "copy/cuda/cuda_handles.hpp"
#include "copy/cuda/doorbell.hpp"
#include "copy/cuda/stream_gates.hpp"
#include "copy/job_queue.hpp"
#include "kernels/slot_copy.hpp"
#include "kvshard/copy_engine.hpp"

namespace kvshard {

/// Copies with kernels on streams of its own.
///
/// A job that finds the engine idle is launched at once. Others wait for progress(), which launches those that
/// are alike together, and sees by events what has ended. Who is about to sleep has arm() let another stream wait
/// for the oldest of those events, and ring wake_fd(): no callback ever stands between two copies, and who polls
/// pays for none.
///
/// Owns:    its streams, and the pinned and device memory through which kernels learn of pages: made at the
///          start, larger only after a job with more pages than any before.
/// Errors:  submit() gives invalid_argument for 2 GiB and more in one job. A CUDA failure ends the jobs of its
///          launch with its own words, as internal.
class CudaCopyEngine final : public CopyEngine {
 public:
  /// unsupported where there is no such device.
  static Result<std::unique_ptr<CopyEngine>> create(const CopyEngineOptions& options);
  ~CudaCopyEngine();
  CudaCopyEngine(const CudaCopyEngine&) = delete;
  CudaCopyEngine& operator=(const CudaCopyEngine&) = delete;

  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::cuda; }
  [[nodiscard]] int device() const noexcept override { return device_; }
  Status submit(const CopyJob& job, CopyListener& listener) override;
  std::size_t progress() noexcept override;
  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  [[nodiscard]] int wake_fd() const noexcept override { return doorbell_->fd(); }
  bool arm() noexcept override;
  [[nodiscard]] bool fired(EventHandle event) const noexcept override;
  Result<std::unique_ptr<StreamGate>> hold(StreamHandle stream) override {
    return gates_.hold(stream);
  }

 private:
  static constexpr std::size_t kGroups = 32;        // launches in flight
  static constexpr std::size_t kJobsPerGroup = 24;  // as one launch of the kernel takes
  static constexpr std::size_t kRingBytes = std::size_t{1} << 20;

  // Jobs that went out together.
  struct Group {
    CudaEvent done;
    QueuedJob* first_job{nullptr};
    std::size_t ring_end{0};  // what it holds of the ring ends here
    bool rings{false};        // the doorbell, when it ends
    Status status;
  };
  // A ring of descriptors: written here, copied to the device, read by kernels, free again in order.
  struct Ring {
    PinnedBuffer pinned;
    DeviceBuffer device;
    std::size_t bytes{0};
    std::size_t head{0};  // the oldest in use
    std::size_t tail{0};  // the next to write
  };
  // Launches take turns on two, so that a GPU that ends one has the next one's descriptors already. A cap on
  // multiprocessors is for all that run at once, so that with a cap there is one.
  struct Lane {
    CudaStream stream;
    cudaEvent_t last{nullptr};  // the end of what went out last on it; a group's
  };
  // What the launcher reads, filled anew for each launch.
  struct LaunchLists {
    std::vector<kernels::SlotPiece> pieces;
    std::vector<kernels::Slot> slots;
    std::vector<kernels::PullPiece> pulls;
  };

  CudaCopyEngine(const CopyEngineOptions& options, Doorbell* doorbell) noexcept;
  Status start(const CopyEngineOptions& options);
  std::size_t retire() noexcept;
  void launch_queued() noexcept;
  Status launch(std::size_t group_index, std::size_t jobs, std::size_t at, std::size_t bytes);
  // Where a launch goes; with another direction than the last, behind all that went before.
  Result<cudaStream_t> next_stream(CopyJob::Direction direction) noexcept;
  template <typename FragmentsOf>
  void add_pulls(const QueuedJob& job, const FragmentsOf& fragments_of);
  // Of what the lists hold.
  cudaError_t launch_kernel(CopyJob::Direction direction, std::uint64_t alignment,
                            cudaStream_t stream) const noexcept;
  Status grow_ring(std::size_t bytes);
  // Where `bytes` may be written now; npos when the ring is too full for them.
  [[nodiscard]] std::size_t find_room(std::size_t bytes) const noexcept;
  [[nodiscard]] Status outcome(const QueuedJob& job, std::size_t result) const;

  int device_;
  StreamGates gates_{device_};
  std::uint32_t max_sms_;
  bool bulk_copies_{false};
  Doorbell* doorbell_;
  std::array<Lane, 2> lanes_;
  std::size_t lane_{0};                                       // of the last launch
  CopyJob::Direction direction_{CopyJob::Direction::gather};  // of the last launch
  CudaStream bell_stream_;
  JobQueue queue_;
  Ring ring_;
  PinnedBuffer results_;  // kernels::SlotFound for each job of each group
  DeviceBuffer sums_;     // kernels::kChecksumSums words for each, 0 between launches
  LaunchLists lists_;
  std::array<Group, kGroups> groups_;
  std::size_t first_group_{0};
  std::size_t group_count_{0};
  std::size_t in_flight_{0};
};

/// One cudaMalloc: exportable by CUDA IPC, and registrable with a network.
class CudaStagingMemory final : public StagingMemory {
 public:
  static Result<std::unique_ptr<StagingMemory>> create(int device, std::size_t bytes);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept override {
    return {static_cast<std::byte*>(memory_.get()), bytes_};
  }
  [[nodiscard]] MemoryKind kind() const noexcept override { return MemoryKind::cuda; }

 private:
  CudaStagingMemory(DeviceBuffer memory, std::size_t bytes) noexcept
      : memory_{std::move(memory)}, bytes_{bytes} {}

  DeviceBuffer memory_;
  std::size_t bytes_;
};

}  // namespace kvshard
