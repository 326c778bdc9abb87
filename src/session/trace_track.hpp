#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "kvshard/clock.hpp"
#include "kvshard/metrics.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// One stage of a pull or of one of its pieces, as both histograms and traces take it.
struct Span {
  Stage stage{};
  TimePoint begin{}, end{};
  RoomId room{};
  std::uint64_t pull{0};    ///< as the decode rank numbers it
  std::uint32_t source{0};  ///< shard rank that the bytes come from
  std::uint64_t lease{0};   ///< as the source numbers it; 0: there is none yet
  // Of a piece:
  std::uint32_t slot{0};
  std::uint64_t piece{0};
  std::uint64_t bytes{0};
  Duration waited{0};  ///< before, for the slot
};

/// The last spans of one rank.
///
/// Threads: thread-safe.
class TraceTrack {
 public:
  TraceTrack(std::string name, std::uint32_t one_in, std::size_t capacity)
      : name_{std::move(name)}, one_in_{one_in}, capacity_{capacity} {
    spans_.reserve(capacity);  // a pull should not wait for them to move
  }

  void add(const Span& span) {
    if (index(span.room) % one_in_ != 0) return;
    const MutexLock lock{mutex_};
    if (spans_.size() < capacity_) {
      spans_.push_back(span);
    } else {
      spans_[added_ % capacity_] = span;
    }
    ++added_;
  }

  struct Copy {
    std::vector<Span> spans;  // in the order in which they ended
    std::uint64_t overwritten;
  };
  [[nodiscard]] Copy copy() const {
    const MutexLock lock{mutex_};
    const std::uint64_t overwritten = added_ - spans_.size();
    const auto oldest = static_cast<std::ptrdiff_t>(overwritten % capacity_);
    Copy made{.spans = {spans_.begin() + oldest, spans_.end()}, .overwritten = overwritten};
    made.spans.insert(made.spans.end(), spans_.begin(), spans_.begin() + oldest);
    return made;
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  const std::string name_;
  const std::uint32_t one_in_;
  const std::size_t capacity_;
  mutable Mutex mutex_;
  std::vector<Span> spans_ KVSHARD_GUARDED_BY(mutex_);
  std::uint64_t added_ KVSHARD_GUARDED_BY(mutex_){0};
};

}  // namespace kvshard
