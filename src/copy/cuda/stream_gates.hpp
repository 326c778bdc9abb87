#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "copy/cuda/cuda_handles.hpp"
#include "kvshard/copy_engine.hpp"

namespace kvshard {

/// Words in pinned memory that streams wait for with the driver's stream memory operations: no thread is held,
/// and no kernel spins. A word's value rises each time it is used, so that a word can be given out again while a
/// stream has yet to notice that an earlier wait is over.
///
/// Owns:    the words. Gates must not outlive them.
/// Threads: thread-safe.
class StreamGates {
 public:
  explicit StreamGates(int device) noexcept : device_{device} {}

  /// Errors: resource_exhausted when kGates streams wait; unsupported where the driver has no such operation.
  Result<std::unique_ptr<StreamGate>> hold(StreamHandle stream);

 private:
  static constexpr std::size_t kGates = 4096;
  class Gate;
  struct Word {
    std::uint32_t* host;
    std::uint32_t value;
  };

  Status make_words() KVSHARD_REQUIRES(mutex_);

  const int device_;
  Mutex mutex_;
  PinnedBuffer memory_ KVSHARD_GUARDED_BY(mutex_);
  std::vector<Word> free_ KVSHARD_GUARDED_BY(mutex_);
};

}  // namespace kvshard
