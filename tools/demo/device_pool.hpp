#pragma once

#include <memory>
#include <span>
#include <string>

#include "kvshard/copy_engine.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/result.hpp"
#include "tiny_llm/kv.hpp"

namespace demo {

/// A rank's pages in GPU memory, for `--memory cuda`: the model computes on the host, so pages go up
/// before they are published and come down after they were pulled. What kvshard moves is device memory.
///
/// Owns: the device memory; not the host pool, which must outlive it.
class DevicePool {
 public:
  /// Errors: unsupported in a build or on a machine without CUDA.
  static kvshard::Result<std::unique_ptr<DevicePool>> create(tiny_llm::KvPool& host);

  /// The pool as kvshard sees it: the host pool's geometry, device addresses.
  [[nodiscard]] kvshard::Pool describe(std::string model_id) const;
  /// Copy pages between the two, in all buffers; both return when the bytes are there.
  kvshard::Status upload(std::span<const kvshard::LocalPage> pages);
  kvshard::Status download(std::span<const kvshard::LocalPage> pages);

 private:
  DevicePool(tiny_llm::KvPool& host, std::unique_ptr<kvshard::StagingMemory> memory)
      : host_{host}, memory_{std::move(memory)} {}
  [[nodiscard]] std::byte* page(std::size_t buffer, kvshard::LocalPage page) const;

  tiny_llm::KvPool& host_;
  std::unique_ptr<kvshard::StagingMemory> memory_;
};

}  // namespace demo
