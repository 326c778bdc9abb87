#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "copy/host/host_team.hpp"
#include "copy/job_queue.hpp"
#include "kvshard/copy_engine.hpp"

namespace kvshard {

/// Copies on the CPU, inside progress(); the oracle for the CUDA engine.
///
/// Big jobs are cut into blocks that `threads` threads share; a small job is done sooner by one.
class HostCopyEngine final : public CopyEngine {
 public:
  explicit HostCopyEngine(std::uint32_t threads);

  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::host; }
  Status submit(const CopyJob& job, CopyListener& listener) override;
  std::size_t progress() noexcept override;
  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  [[nodiscard]] int wake_fd() const noexcept override { return -1; }

 private:
  [[nodiscard]] Status run(const QueuedJob& job) noexcept;

  JobQueue queue_;
  std::size_t in_flight_{0};
  HostTeam team_;
};

/// Anonymous memory of this process, every page of it present from the start.
class HostStagingMemory final : public StagingMemory {
 public:
  static Result<std::unique_ptr<StagingMemory>> create(std::size_t bytes);
  ~HostStagingMemory();
  HostStagingMemory(const HostStagingMemory&) = delete;
  HostStagingMemory& operator=(const HostStagingMemory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept override { return bytes_; }
  [[nodiscard]] MemoryKind kind() const noexcept override { return MemoryKind::host; }

 private:
  explicit HostStagingMemory(std::span<std::byte> bytes) noexcept : bytes_{bytes} {}

  std::span<std::byte> bytes_;
};

}  // namespace kvshard
