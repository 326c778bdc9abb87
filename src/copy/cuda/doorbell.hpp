#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/unique_fd.hpp"

namespace kvshard {

/// An eventfd that CUDA's callback thread writes and a progress thread waits for. It outlives its engine
/// while callbacks are on their way: each holds a reference.
///
/// Threads: ring() and drop() on any; the rest on one.
class Doorbell {
 public:
  Doorbell() noexcept : fd_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  void hold() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  /// Destroys the doorbell when nobody holds it any more.
  void drop() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;  // pairs with itself
  }
  void ring() noexcept {
    if (rung_.load(std::memory_order_acquire))
      return;  // readable already, and nobody has looked since
    const std::uint64_t one = 1;
    (void)!write(fd_.get(), &one, sizeof one);
    rung_.store(true, std::memory_order_release);  // pairs with the acquire in quiet()
  }
  /// Clears the descriptor. What rings after this call is heard at the next.
  void quiet() noexcept {
    if (!rung_.exchange(false, std::memory_order_acquire)) return;
    std::uint64_t rings = 0;
    (void)!read(fd_.get(), &rings, sizeof rings);
  }

 private:
  ~Doorbell() = default;

  UniqueFd fd_;
  std::atomic<int> references_{1};
  std::atomic<bool> rung_{false};
};

}  // namespace kvshard
