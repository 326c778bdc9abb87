#include "copy/cuda/stream_gates.hpp"

#include <cuda.h>
#include <fmt/format.h>

#include <atomic>
#include <utility>

#include "base/try.hpp"

namespace kvshard {
namespace {

using StreamWaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// From the driver that the runtime has loaded, so that the library does not link it.
StreamWaitValue stream_wait_value() noexcept {
  static const StreamWaitValue found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000,
                                                               cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      (void)cudaGetLastError();
      return StreamWaitValue{};
    }
    return reinterpret_cast<StreamWaitValue>(entry);
  }();
  return found;
}

}  // namespace

class StreamGates::Gate final : public StreamGate {
 public:
  Gate(StreamGates& gates, Word word) noexcept : gates_{gates}, word_{word} {}
  ~Gate() override {
    // What was copied before is seen by work that the stream runs next: the GPU reads the word after it.
    std::atomic_ref{*word_.host}.store(word_.value, std::memory_order_release);
    const MutexLock lock{gates_.mutex_};
    gates_.free_.push_back(word_);  // there is room: it was taken from there
  }

 private:
  StreamGates& gates_;
  Word word_;
};

Status StreamGates::make_words() {
  void* memory = nullptr;
  KVSHARD_TRY(
      cuda_status("cudaHostAlloc", cudaHostAlloc(&memory, kGates * sizeof(std::uint32_t),
                                                 cudaHostAllocPortable | cudaHostAllocMapped)));
  memory_ = PinnedBuffer{memory};
  auto* const words = static_cast<std::uint32_t*>(memory);
  free_.reserve(kGates);
  for (std::size_t i = 0; i < kGates; ++i) {
    words[i] = 0;
    free_.push_back({words + i, 0});
  }
  return {};
}

Result<std::unique_ptr<StreamGate>> StreamGates::hold(StreamHandle stream) {
  const StreamWaitValue wait = stream_wait_value();
  if (wait == nullptr)
    return Error{ErrorCode::unsupported, "the CUDA driver lets no stream wait for a value"};
  const DeviceGuard device{device_};
  Word word{};
  {
    const MutexLock lock{mutex_};
    if (!memory_) KVSHARD_TRY(make_words());
    if (free_.empty())
      return Error{ErrorCode::resource_exhausted, fmt::format("{} streams wait", kGates)};
    word = free_.back();
    free_.pop_back();
  }
  ++word.value;
  auto gate = std::make_unique<Gate>(*this, word);
  void* address = nullptr;
  KVSHARD_TRY(
      cuda_status("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&address, word.host, 0)));
  const CUresult result =
      wait(stream, reinterpret_cast<CUdeviceptr>(address), word.value, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) {
    return Error{ErrorCode::unsupported, fmt::format("cuStreamWaitValue32: CUDA driver error {}",
                                                     static_cast<int>(result))};
  }
  return std::unique_ptr<StreamGate>{std::move(gate)};
}

}  // namespace kvshard
