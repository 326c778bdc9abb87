#include "copy/cuda/cuda_copy_engine.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/log.hpp"
#include "base/try.hpp"
#include "copy/cuda/nvtx.hpp"
#include "copy/slot_format.hpp"

namespace kvshard {
namespace {

static_assert(kernels::kSlotMagic == kSlotMagic && kernels::kChecksumStep == kChecksumStep);
static_assert(kernels::kHeaderBytes == kSlotHeaderBytes);
static_assert(sizeof(SlotMark) == kernels::kMarkWords * sizeof(std::uint64_t));

constexpr std::size_t kNoRoom = std::numeric_limits<std::size_t>::max();

std::size_t descriptor_bytes(const QueuedJob& job) noexcept {
  return (job.buffers.size() + job.offsets.size()) * sizeof(std::uint64_t);
}

// Whether `job` may go out in the launch that `first` begins. Two directions may not, since one may read what
// the other writes; nor may a job that waits for an event the others need not wait for.
bool joins(const QueuedJob& job, const QueuedJob& first) noexcept {
  return job.direction == first.direction && job.alignment == first.alignment &&
         (job.after == nullptr || job.after == first.after);
}

SlotMark mark_of(const std::uint64_t (&words)[kernels::kMarkWords]) noexcept {
  SlotMark mark;
  std::memcpy(&mark, words, sizeof mark);
  return mark;
}

}  // namespace

Result<std::unique_ptr<CopyEngine>> CudaCopyEngine::create(const CopyEngineOptions& options) {
  KVSHARD_TRY(check_device(options.cuda_device));
  auto* const doorbell = new Doorbell;
  std::unique_ptr<CudaCopyEngine> engine{new CudaCopyEngine{options, doorbell}};
  if (doorbell->fd() < 0) return Error{ErrorCode::resource_exhausted, "no file descriptor left"};
  const DeviceGuard guard{options.cuda_device};
  KVSHARD_TRY(engine->start(options));
  return std::unique_ptr<CopyEngine>{std::move(engine)};
}

CudaCopyEngine::CudaCopyEngine(const CopyEngineOptions& options, Doorbell* doorbell) noexcept
    : device_{options.cuda_device}, max_sms_{options.cuda_max_sms}, doorbell_{doorbell} {}

Status CudaCopyEngine::start(const CopyEngineOptions& options) {
  int major = 0;
  KVSHARD_TRY(
      cuda_status("compute capability",
                  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_)));
  bulk_copies_ = major >= 9;
  if (bulk_copies_)
    KVSHARD_TRY(cuda_status("shared memory of bulk copies", kernels::prepare_bulk_copies()));

  int least = 0;
  int greatest = 0;
  KVSHARD_TRY(
      cuda_status("stream priorities", cudaDeviceGetStreamPriorityRange(&least, &greatest)));
  for (CudaStream* const made : {&lanes_[0].stream, &lanes_[1].stream, &bell_stream_}) {
    cudaStream_t stream = nullptr;
    KVSHARD_TRY(
        cuda_status("cudaStreamCreate",
                    cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                 options.cuda_high_priority ? greatest : least)));
    *made = CudaStream{stream};
  }
  for (Group& group : groups_) {
    cudaEvent_t event = nullptr;
    KVSHARD_TRY(
        cuda_status("cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    group.done = CudaEvent{event};
  }
  KVSHARD_TRY(results_, make_pinned_buffer(kGroups * kJobsPerGroup * sizeof(kernels::SlotFound)));
  constexpr std::size_t kSumsBytes =
      kGroups * kJobsPerGroup * kernels::kChecksumSums * sizeof(std::uint64_t);
  KVSHARD_TRY(sums_, make_device_buffer(kSumsBytes));
  KVSHARD_TRY(
      cuda_status("cudaMemset", cudaMemsetAsync(sums_.get(), 0, kSumsBytes, bell_stream_.get())));
  KVSHARD_TRY(cuda_status("cudaMemset", cudaStreamSynchronize(bell_stream_.get())));
  lists_.slots.reserve(kJobsPerGroup);
  return grow_ring(kRingBytes);
}

CudaCopyEngine::~CudaCopyEngine() {
  if (in_flight_ != 0) {
    // Kernels may still read what they were given, and waiting for them has no bound.
    log::warning("copy engine destroyed: {} jobs in flight, their descriptors are leaked",
                 in_flight_);
    (void)ring_.pinned.release();
    (void)ring_.device.release();
    (void)results_.release();
    (void)sums_.release();
  }
  doorbell_->drop();
}

Status CudaCopyEngine::submit(const CopyJob& job, CopyListener& listener) {
  if (job.stamp.payload_bytes >= kernels::kMaxPieceUnits)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} bytes in one job, at most {}", job.stamp.payload_bytes,
                             kernels::kMaxPieceUnits - 1)};
  KVSHARD_TRY(queue_.push(job, listener));
  ++in_flight_;
  if (group_count_ == 0) {
    const DeviceGuard guard{device_};
    launch_queued();
  }
  if (queue_.front() != nullptr) doorbell_->ring();  // progress() launches it
  return {};
}

bool CudaCopyEngine::fired(EventHandle event) const noexcept {
  if (event == nullptr) return true;
  const DeviceGuard guard{device_};
  const cudaError_t error = cudaEventQuery(event);
  if (error != cudaSuccess) (void)cudaGetLastError();  // cudaErrorNotReady is one to CUDA
  return error == cudaSuccess;
}

std::size_t CudaCopyEngine::progress() noexcept {
  doorbell_->quiet();
  if (in_flight_ == 0) return 0;
  const DeviceGuard guard{device_};
  const std::size_t ended = retire();
  launch_queued();
  return ended;
}

std::size_t CudaCopyEngine::retire() noexcept {
  std::size_t ended = 0;
  while (group_count_ != 0) {
    const std::size_t group_index = first_group_;
    Group& group = groups_[group_index];
    const cudaError_t error = cudaEventQuery(group.done.get());
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();  // not a failure, and not for the engine's own check to find
      break;
    }
    if (group.status) group.status = cuda_status("copy", error);
    QueuedJob* job = group.first_job;
    ring_.head = group.ring_end;
    group.rings = false;
    for (std::size_t i = 0; job != nullptr; ++i, ++ended, --in_flight_) {
      Status status = group.status ? outcome(*job, group_index * kJobsPerGroup + i) : group.status;
      CopyListener& listener = *job->listener;
      QueuedJob* const next = job->next;
      queue_.recycle(job);
      job = next;
      listener.copy_done(std::move(status));
    }
    first_group_ = (first_group_ + 1) % kGroups;
    --group_count_;
  }
  return ended;
}

Status CudaCopyEngine::outcome(const QueuedJob& job, std::size_t result) const {
  if (job.direction != CopyJob::Direction::scatter) return {};
  const kernels::SlotFound& found = static_cast<const kernels::SlotFound*>(results_.get())[result];
  KVSHARD_TRY(check_mark(mark_of(found.header), job.stamp, "header"));
  KVSHARD_TRY(check_mark(mark_of(found.trailer), job.stamp, "trailer"));
  if (!job.checksum) return {};
  return check_checksum(mark_of(found.header).checksum, found.checksum);
}

void CudaCopyEngine::launch_queued() noexcept {
  while (queue_.front() != nullptr && group_count_ < kGroups) {
    const QueuedJob& first = *queue_.front();
    std::size_t jobs = 0;
    std::size_t bytes = 0;
    for (const QueuedJob* job = &first; job != nullptr && jobs < kJobsPerGroup; job = job->next) {
      const std::size_t job_bytes = descriptor_bytes(*job);
      if (jobs != 0 && (!joins(*job, first) || bytes + job_bytes > ring_.bytes / 2)) break;
      ++jobs;
      bytes += job_bytes;
    }
    Status status;
    if (bytes > ring_.bytes / 2 && group_count_ == 0) status = grow_ring(2 * bytes);
    if (group_count_ == 0) ring_.head = ring_.tail = 0;
    const std::size_t at = status ? find_room(bytes) : 0;
    if (at == kNoRoom) return;  // until a group ends

    const std::size_t group_index = (first_group_ + group_count_) % kGroups;
    Group& group = groups_[group_index];
    ++group_count_;
    if (status) {
      group.ring_end = ring_.tail = at + bytes;
      status = launch(group_index, jobs, at, bytes);
    } else {
      group.ring_end = ring_.tail;
    }
    group.status = std::move(status);
    group.first_job = queue_.pop();
    for (QueuedJob* job = group.first_job; --jobs != 0; job = job->next) job->next = queue_.pop();
  }
}

std::size_t CudaCopyEngine::find_room(std::size_t bytes) const noexcept {
  // A full ring would look like an empty one, so the tail never meets the head from behind.
  if (ring_.tail < ring_.head) return bytes < ring_.head - ring_.tail ? ring_.tail : kNoRoom;
  if (bytes <= ring_.bytes - ring_.tail) return ring_.tail;
  return bytes < ring_.head ? 0 : kNoRoom;
}

Status CudaCopyEngine::grow_ring(std::size_t bytes) {
  KVSHARD_TRY(PinnedBuffer pinned, make_pinned_buffer(bytes));
  KVSHARD_TRY(DeviceBuffer device, make_device_buffer(bytes));
  ring_ = {std::move(pinned), std::move(device), bytes, 0, 0};
  return {};
}

// Fills [at, at + bytes) of the ring, and enqueues the wait, the descriptors, the kernel and the event.
Status CudaCopyEngine::launch(std::size_t group_index, std::size_t jobs, std::size_t at,
                              std::size_t bytes) {
  const QueuedJob& first = *queue_.front();
  auto* pinned = static_cast<std::uint64_t*>(ring_.pinned.get()) + at / sizeof(std::uint64_t);
  const auto* device =
      static_cast<const std::uint64_t*>(ring_.device.get()) + at / sizeof(std::uint64_t);
  // Copies `values` into the ring, and returns where the kernel will find them.
  const auto put = [&pinned, &device](const auto& values) {
    static_assert(sizeof values[0] == sizeof(std::uint64_t));
    const std::uint64_t* const found_at = device;
    std::memcpy(pinned, values.data(), values.size() * sizeof(std::uint64_t));
    pinned += values.size();
    device += values.size();
    return found_at;
  };
  const auto fragments_of = [&put](const QueuedBatch& batch) {
    return kernels::Fragments{.buffers = put(batch.buffers),
                              .offsets = put(batch.offsets),
                              .buffer_count = static_cast<std::uint32_t>(batch.buffers.size()),
                              .offset_count = static_cast<std::uint32_t>(batch.offsets.size()),
                              .outer = batch.shape.outer,
                              .inner = batch.shape.inner,
                              .outer_stride = batch.shape.outer_stride,
                              .inner_stride = batch.shape.inner_stride,
                              .row_bytes = batch.shape.row_bytes};
  };
  lists_.pieces.clear();
  lists_.slots.clear();
  lists_.pulls.clear();
  std::uint64_t payload_bytes = 0;
  const QueuedJob* job = &first;
  for (std::size_t i = 0; i < jobs; ++i, job = job->next) {
    payload_bytes += job->stamp.payload_bytes;
    if (job->direction == CopyJob::Direction::pull) {
      add_pulls(*job, fragments_of);
      continue;
    }
    const std::size_t result = group_index * kJobsPerGroup + i;
    const bool scatter = job->direction == CopyJob::Direction::scatter;
    for (const QueuedBatch& batch : job->batches)
      lists_.pieces.push_back({.fragments = fragments_of(batch),
                               .slot = static_cast<std::uint32_t>(i),
                               .payload_offset = batch.payload_offset});
    lists_.slots.push_back(
        {.address = job->slot,
         .lease = job->stamp.lease,
         .generation = job->stamp.generation,
         .chunk = job->stamp.chunk,
         .payload_bytes = job->stamp.payload_bytes,
         .sums = job->checksum
                     ? static_cast<std::uint64_t*>(sums_.get()) + result * kernels::kChecksumSums
                     : nullptr,
         .found = scatter ? static_cast<kernels::SlotFound*>(results_.get()) + result : nullptr});
  }
  const NvtxRange range{first.direction == CopyJob::Direction::gather    ? "gather"
                        : first.direction == CopyJob::Direction::scatter ? "scatter"
                                                                         : "mapped pull",
                        payload_bytes};
  KVSHARD_TRY(cudaStream_t const stream, next_stream(first.direction));
  if (first.after != nullptr)
    KVSHARD_TRY(cuda_status("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, first.after, 0)));
  if (bytes != 0)
    KVSHARD_TRY(cuda_status("cudaMemcpyAsync",
                            cudaMemcpyAsync(static_cast<std::byte*>(ring_.device.get()) + at,
                                            static_cast<const std::byte*>(ring_.pinned.get()) + at,
                                            bytes, cudaMemcpyHostToDevice, stream)));
  KVSHARD_TRY(cuda_status("copy kernel", launch_kernel(first.direction, first.alignment, stream)));
  lanes_[lane_].last = groups_[group_index].done.get();
  return cuda_status("cudaEventRecord", cudaEventRecord(groups_[group_index].done.get(), stream));
}

Result<cudaStream_t> CudaCopyEngine::next_stream(CopyJob::Direction direction) noexcept {
  if (max_sms_ != 0) return lanes_[0].stream.get();
  if (std::exchange(direction_, direction) != direction) {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      cudaEvent_t const other = lanes_[1 - lane].last;
      if (other != nullptr)
        KVSHARD_TRY(cuda_status("cudaStreamWaitEvent",
                                cudaStreamWaitEvent(lanes_[lane].stream.get(), other, 0)));
    }
  }
  lane_ = 1 - lane_;
  return lanes_[lane_].stream.get();
}

// Groups end in order, so the oldest is the one to hear of.
bool CudaCopyEngine::arm() noexcept {
  if (group_count_ == 0) return true;
  Group& oldest = groups_[first_group_];
  if (oldest.rings) return true;
  const DeviceGuard guard{device_};
  const auto waits = [&] {
    if (cudaEventQuery(oldest.done.get()) != cudaErrorNotReady) return false;
    (void)cudaGetLastError();  // cudaErrorNotReady is one to CUDA
    if (cudaStreamWaitEvent(bell_stream_.get(), oldest.done.get(), 0) != cudaSuccess) return false;
    doorbell_->hold();
    const auto ring = [](void* doorbell) {
      static_cast<Doorbell*>(doorbell)->ring();
      static_cast<Doorbell*>(doorbell)->drop();
    };
    if (cudaLaunchHostFunc(bell_stream_.get(), ring, doorbell_) == cudaSuccess) return true;
    doorbell_->drop();
    return false;
  };
  oldest.rings = waits();
  if (!oldest.rings) (void)cudaGetLastError();  // retire() finds what failed
  return oldest.rings;
}

// Cuts a pull where either side begins another batch.
template <typename FragmentsOf>
void CudaCopyEngine::add_pulls(const QueuedJob& job, const FragmentsOf& fragments_of) {
  auto source = job.sources.begin();
  kernels::Fragments from{};
  std::uint64_t at = 0;
  for (const QueuedBatch& batch : job.batches) {
    const kernels::Fragments to = fragments_of(batch);
    for (const std::uint64_t end = at + batch.bytes; at < end;) {
      if (source->payload_offset == at) from = fragments_of(*source);
      const std::uint64_t source_end = source->payload_offset + source->bytes;
      const std::uint64_t piece_end = std::min(end, source_end);
      lists_.pulls.push_back({.from = from,
                              .to = to,
                              .from_offset = at - source->payload_offset,
                              .to_offset = at - batch.payload_offset,
                              .bytes = piece_end - at});
      at = piece_end;
      if (at == source_end) ++source;
    }
  }
}

cudaError_t CudaCopyEngine::launch_kernel(CopyJob::Direction direction, std::uint64_t alignment,
                                          cudaStream_t stream) const noexcept {
  const auto unit_bytes = static_cast<std::uint32_t>(alignment);
  if (direction == CopyJob::Direction::pull)
    return kernels::launch_pull({.pieces = lists_.pulls.data(),
                                 .piece_count = static_cast<std::uint32_t>(lists_.pulls.size()),
                                 .unit_bytes = unit_bytes,
                                 .max_sms = max_sms_,
                                 .bulk_copies = bulk_copies_},
                                stream);
  const kernels::SlotCopyArgs args{.pieces = lists_.pieces.data(),
                                   .piece_count = static_cast<std::uint32_t>(lists_.pieces.size()),
                                   .slots = lists_.slots.data(),
                                   .slot_count = static_cast<std::uint32_t>(lists_.slots.size()),
                                   .unit_bytes = unit_bytes,
                                   .max_sms = max_sms_,
                                   .bulk_copies = bulk_copies_};
  return direction == CopyJob::Direction::gather ? kernels::launch_gather(args, stream)
                                                 : kernels::launch_scatter(args, stream);
}

Result<std::unique_ptr<StagingMemory>> CudaStagingMemory::create(int device, std::size_t bytes) {
  if (bytes == 0) return Error{ErrorCode::invalid_argument, "staging memory of 0 bytes"};
  KVSHARD_TRY(check_device(device));
  const DeviceGuard guard{device};
  KVSHARD_TRY(DeviceBuffer memory, make_device_buffer(bytes));
  return std::unique_ptr<StagingMemory>{new CudaStagingMemory{std::move(memory), bytes}};
}

}  // namespace kvshard
