#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/mutex.hpp"

namespace kvshard {

/// Threads that help the calling thread through the blocks of one task at a time.
///
/// Threads: run() on one thread at a time.
class HostTeam {
 public:
  using Task = void (*)(void* context, std::uint64_t block) noexcept;

  explicit HostTeam(std::uint32_t helpers);
  ~HostTeam();
  HostTeam(const HostTeam&) = delete;
  HostTeam& operator=(const HostTeam&) = delete;

  /// Calls task(context, block) once for each block in [0, blocks), here and on the helpers, and
  /// returns when the last call has. A helper that wakes too late is not waited for.
  void run(std::uint64_t blocks, Task task, void* context) noexcept;

 private:
  void help(const std::stop_token& stop) noexcept;
  void work(std::uint64_t blocks, Task task, void* context) noexcept;

  Mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable_any idle_;
  std::uint64_t round_ KVSHARD_GUARDED_BY(mutex_){0};
  bool open_ KVSHARD_GUARDED_BY(mutex_){false};  // helpers may join this round
  std::uint32_t busy_ KVSHARD_GUARDED_BY(mutex_){0};
  std::uint64_t blocks_ KVSHARD_GUARDED_BY(mutex_){0};
  Task task_ KVSHARD_GUARDED_BY(mutex_){nullptr};
  void* context_ KVSHARD_GUARDED_BY(mutex_){nullptr};
  std::atomic<std::uint64_t> next_block_{
      0};  // order comes from mutex_; this only hands out numbers
  std::vector<std::jthread> helpers_;
};

}  // namespace kvshard
