#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "base/try.hpp"
#include "kvshard/tracer.hpp"

namespace kvshard::tools {

/// A rank process's trace: goes into its file when this object goes, which must be after the rank.
class RankTrace {
 public:
  /// No file: nothing is traced.
  RankTrace() = default;
  static Result<RankTrace> create(std::string file, std::string process) {
    RankTrace made;
    if (file.empty()) return Result<RankTrace>{std::move(made)};
    KVSHARD_TRY(made.tracer_, Tracer::create({.process = std::move(process)}));
    made.file_ = std::move(file);
    return made;
  }
  RankTrace(RankTrace&&) noexcept = default;
  RankTrace& operator=(RankTrace&&) noexcept = default;
  ~RankTrace() {
    if (!tracer_) return;
    if (const Status written = tracer_->write(file_); !written)
      fmt::print(stderr, "{}\n", written.error().message);
  }

  /// Null when nothing is traced.
  [[nodiscard]] const std::shared_ptr<Tracer>& tracer() const noexcept { return tracer_; }

 private:
  std::string file_;
  std::shared_ptr<Tracer> tracer_;
};

}  // namespace kvshard::tools
