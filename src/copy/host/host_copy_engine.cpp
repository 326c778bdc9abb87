#include "copy/host/host_copy_engine.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/try.hpp"
#include "copy/slot_format.hpp"

namespace kvshard {
namespace {

// A block and what it is copied from stay in a core's second-level cache, so that the checksum
// reads from there what the copy has just touched.
constexpr std::uint64_t kBlockBytes = 128 * 1024;
// One call of progress() starts no further job after this many bytes, and the caller's other work
// waits no longer than that takes.
constexpr std::uint64_t kBytesPerProgress = 4 * 1024 * 1024;

// Below this a job is done before a sleeping helper has woken: two threads took as long over 1 MiB as one
// (105 and 120 us), and three quarters of the time over 4 MiB.
constexpr std::uint64_t kSharedBytes = 2 * 1024 * 1024;

struct BlockTask {
  const QueuedJob& job;
  std::byte* payload;  // null in a pull
  std::uint64_t padded_bytes;
  std::atomic<std::uint64_t> checksum{0};  // a sum: any order; read after the team is idle

  void add_checksum(std::uint64_t begin, std::uint64_t end) noexcept {
    checksum.fetch_add(checksum_words(payload + begin, begin / 8, (end - begin) / 8),
                       std::memory_order_relaxed);
  }

  void copy(std::uint64_t begin, std::uint64_t end) noexcept {
    switch (job.direction) {
      case CopyJob::Direction::gather:
        return for_each_piece(job.batches, begin, end,
                              [this](const std::byte* pool, std::uint64_t at, std::uint64_t bytes) {
                                std::memcpy(payload + at, pool, bytes);
                              });
      case CopyJob::Direction::scatter:
        return for_each_piece(job.batches, begin, end,
                              [this](std::byte* pool, std::uint64_t at, std::uint64_t bytes) {
                                std::memcpy(pool, payload + at, bytes);
                              });
      case CopyJob::Direction::pull:
        return for_each_piece(
            job.sources, begin, end,
            [this](const std::byte* source, std::uint64_t first, std::uint64_t bytes) {
              for_each_piece(job.batches, first, first + bytes,
                             [&](std::byte* pool, std::uint64_t at, std::uint64_t part) {
                               std::memcpy(pool, source + (at - first), part);
                             });
            });
    }
  }

  static void run(void* context, std::uint64_t block) noexcept {
    auto& task = *static_cast<BlockTask*>(context);
    const std::uint64_t begin = block * kBlockBytes;
    const std::uint64_t end = std::min(begin + kBlockBytes, task.padded_bytes);
    const bool gather = task.job.direction == CopyJob::Direction::gather;
    if (task.job.checksum && !gather) task.add_checksum(begin, end);
    task.copy(begin, end);
    if (task.job.checksum && gather) task.add_checksum(begin, end);
  }
};

}  // namespace

HostCopyEngine::HostCopyEngine(std::uint32_t threads) : team_{threads > 1 ? threads - 1 : 0} {}

Status HostCopyEngine::submit(const CopyJob& job, CopyListener& listener) {
  if (job.after != nullptr)
    return Error{ErrorCode::unsupported, "the host copy engine cannot wait for a CUDA event"};
  KVSHARD_TRY(queue_.push(job, listener));
  ++in_flight_;
  return {};
}

std::size_t HostCopyEngine::progress() noexcept {
  std::size_t ended = 0;
  std::uint64_t bytes = 0;
  while (bytes < kBytesPerProgress) {
    QueuedJob* const job = queue_.pop();
    if (job == nullptr) break;
    Status status = run(*job);
    CopyListener& listener = *job->listener;
    bytes += slot_bytes_for(job->stamp.payload_bytes);
    queue_.recycle(job);
    --in_flight_;
    ++ended;
    listener.copy_done(std::move(status));
  }
  return ended;
}

Status HostCopyEngine::run(const QueuedJob& job) noexcept {
  const bool gather = job.direction == CopyJob::Direction::gather;
  std::byte* const payload = job.slot == nullptr ? nullptr : job.slot + kSlotHeaderBytes;
  BlockTask task{job, payload, padded_payload_bytes(job.stamp.payload_bytes)};
  if (gather) write_marks(job.slot, job.stamp, 0);
  if (job.direction == CopyJob::Direction::scatter) KVSHARD_TRY(check_marks(job.slot, job.stamp));
  const std::uint64_t blocks = (task.padded_bytes + kBlockBytes - 1) / kBlockBytes;
  if (task.padded_bytes >= kSharedBytes) {
    team_.run(blocks, BlockTask::run, &task);
  } else {
    for (std::uint64_t block = 0; block < blocks; ++block) BlockTask::run(&task, block);
  }
  if (!job.checksum) return {};
  const std::uint64_t computed = task.checksum.load(std::memory_order_relaxed);
  if (gather) {
    write_marks(job.slot, job.stamp, computed);
    return {};
  }
  SlotMark header;
  std::memcpy(&header, job.slot, sizeof header);
  return check_checksum(header.checksum, computed);
}

Result<std::unique_ptr<StagingMemory>> HostStagingMemory::create(std::size_t bytes) {
  if (bytes == 0) return Error{ErrorCode::invalid_argument, "staging memory of 0 bytes"};
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED)
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("cannot map {} bytes of staging memory: errno {}", bytes, errno)};
  (void)madvise(mapped, bytes, MADV_HUGEPAGE);  // fewer TLB misses where the kernel allows it
  const std::span<std::byte> memory{static_cast<std::byte*>(mapped), bytes};
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page_bytes)
    *static_cast<volatile std::byte*>(&memory[at]) = std::byte{0};
  return std::unique_ptr<StagingMemory>{new HostStagingMemory{memory}};
}

HostStagingMemory::~HostStagingMemory() {
  munmap(bytes_.data(), bytes_.size());
}

}  // namespace kvshard
