#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

class TraceTrack;

struct TracerOptions {
  std::string process{"kvshard"};      ///< what a viewer calls this process
  std::uint32_t one_in{1};             ///< trace one in so many rooms; the same ones on every rank
  std::size_t spans_per_rank{65'536};  ///< kept; older ones give way. About 80 bytes each
};

/// Records what requests were doing when, on the ranks of this process that were given it in their options.
///
/// write() makes a Chrome trace of it: open it in a trace viewer, or give it to kvshard-trace, which also
/// merges those of other processes on the same host.
///
/// Owns:    its records.
/// Threads: thread-safe.
/// Errors:  create() gives invalid_argument for a zero; write() unavailable when the file cannot be written.
/// Cost:    one span is some 40 ns on the rank's progress thread (docs/benchmarks.md); none without a tracer.
/// Source:  docs/tracing.md.
class KVSHARD_EXPORT Tracer {
 public:
  static Result<std::shared_ptr<Tracer>> create(TracerOptions options = {});
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  /// Writes all that is kept, as one JSON object, to a new file at `path`.
  [[nodiscard]] Status write(const std::string& path) const;

  /// For the library's own use.
  std::shared_ptr<TraceTrack> track(std::string name);

 private:
  class Impl;
  explicit Tracer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
