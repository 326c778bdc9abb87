#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "copy/pool_blob.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/pool_mapping.hpp"
#include "kvshard/result.hpp"

// The exports of this process, by number. A pool of one's own process cannot be mapped by CUDA IPC and need
// not be; and addresses for it are taken from here, never from bytes that a peer sent.
namespace kvshard {

struct LocalPool {
  Pool pool;
  int cuda_device{0};
};

/// Gives `blob` this process's identity and a number, and keeps the pool's pointers until the export is
/// destroyed.
Result<std::unique_ptr<PoolExport>> publish_export(PoolBlob blob, LocalPool local);

/// The pool of a live export of this process. Threads: any.
/// Errors: failed_precondition when it is gone, or `geometry` is not its own.
Result<LocalPool> find_export(std::uint64_t export_id, const Geometry& geometry);

/// A pool of this process, where it is.
class UnmappedPool final : public MappedPool {
 public:
  explicit UnmappedPool(Pool pool) noexcept : pool_{std::move(pool)} {}
  [[nodiscard]] const Pool& pool() const noexcept override { return pool_; }
  [[nodiscard]] std::string_view description() const noexcept override {
    return "in place, a pool of this process";
  }

 private:
  Pool pool_;
};

}  // namespace kvshard
