#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "kvshard/metrics.hpp"
#include "kvshard/tracer.hpp"
#include "session/progress_thread.hpp"
#include "session/trace_track.hpp"

namespace kvshard {

/// Where an end counts in EndCounts.
[[nodiscard]] inline std::size_t end_code(const Status& status) noexcept {
  return status ? 0 : static_cast<std::size_t>(status.error().code);
}

/// What a rank measures of itself, beyond its plain counters: a histogram of each stage, its part of a trace,
/// and what it refused peers for.
///
/// Threads: worker-bound, except stages() and refused().
class Recorder {
 public:
  /// Without `metrics` and a tracer it reads no clock and does nothing.
  Recorder(bool metrics, Tracer* tracer, std::string rank, const Clock& clock)
      : metrics_{metrics},
        track_{tracer != nullptr ? tracer->track(std::move(rank)) : nullptr},
        clock_{clock} {}

  [[nodiscard]] TimePoint now() const noexcept {
    return metrics_ || track_ != nullptr ? clock_.now() : TimePoint{};
  }

  void record(const Span& span) {
    time(span.stage, span.end - span.begin);
    trace(span);
  }
  /// Of what should not mix with what went well.
  void trace(const Span& span) {
    if (track_ != nullptr) track_->add(span);
  }
  void time(Stage stage, Duration duration) noexcept {
    if (metrics_) add(stages_[static_cast<std::size_t>(stage)], duration);
  }
  /// For one writer.
  static void add(DurationHistogram& histogram, Duration duration) noexcept {
    const auto ns = static_cast<std::uint64_t>(std::max<Duration::rep>(duration.count(), 0));
    counters::add_alone(histogram.counts[DurationHistogram::bucket(ns)]);
    counters::add_alone(histogram.sum_ns, ns);
  }
  [[nodiscard]] StageTimes stages() const noexcept { return counters::snapshot(stages_); }

  /// `handshake`: the two sides did not fit together, and the message names the field.
  void refuse(const Error& error, bool handshake) {
    std::string field{handshake ? field_of(error) : to_string(error.code)};
    const MutexLock lock{mutex_};
    auto found = std::ranges::find(refused_, field, &RefusedCount::field);
    if (found == refused_.end() && refused_.size() >= kMaxFields)
      found = std::ranges::find(refused_, field = "other", &RefusedCount::field);
    if (found == refused_.end()) found = refused_.insert(found, {std::move(field), 0});
    ++found->count;
  }
  [[nodiscard]] std::vector<RefusedCount> refused() const {
    const MutexLock lock{mutex_};
    return refused_;
  }

 private:
  static constexpr std::size_t kMaxFields = 32;  // names of buffer groups are in them

  // "epoch: decode wants 2, ..." and "geometry differs: kv.page_size is 64 on ..."
  static std::string_view field_of(const Error& error) {
    std::string_view text = error.message;
    const std::size_t colon = text.find(": ");
    if (error.code != ErrorCode::failed_precondition || colon == text.npos)
      return to_string(error.code);
    if (!text.starts_with("geometry differs")) return text.substr(0, colon);
    text.remove_prefix(colon + 2);
    return text.substr(0, text.find(" is "));
  }

  const bool metrics_;
  const std::shared_ptr<TraceTrack> track_;
  const Clock& clock_;
  mutable StageTimes stages_{};
  mutable Mutex mutex_;
  std::vector<RefusedCount> refused_ KVSHARD_GUARDED_BY(mutex_);
};

}  // namespace kvshard
