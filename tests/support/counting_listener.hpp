#pragma once

#include <string>

#include "kvshard/copy_engine.hpp"

namespace kvshard::test {

/// Remembers how a copy ended, and how often it was told so.
class CountingListener final : public CopyListener {
 public:
  void copy_done(Status status) noexcept override {
    ++calls;
    ok = status.ok();
    if (!ok) {
      ++failures;
      code = status.error().code;
      message = status.error().message;
    }
  }
  int calls{0};
  int failures{0};
  bool ok{false};  ///< the last one
  ErrorCode code{};
  std::string message;
};

}  // namespace kvshard::test
