#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvshard/copy_engine.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard::bench {

/// A page and what it holds: see RowPattern::content.
struct PageContent {
  LocalPage page{};
  std::uint64_t content{0};
};

/// A rank's pool of one buffer group, packed token-major, in one allocation of host or device memory.
///
/// Owns:    the memory.
/// Threads: thread-compatible.
class PatternPool {
 public:
  /// Errors: invalid_argument when rows are not of whole words; unsupported without that memory.
  static Result<PatternPool> create(Geometry geometry, MemoryKind kind, int device);

  [[nodiscard]] Pool describe() const;
  [[nodiscard]] std::span<std::byte> bytes() const { return memory_->bytes(); }
  [[nodiscard]] const BufferGroup& group() const { return geometry_.groups[0]; }

  /// Writes canaries everywhere, then these pages.
  Status fill(std::span<const PageContent> pages);
  /// Every byte of these pages is right, and every other one is still a canary. Errors: data_loss naming
  /// the first that is not.
  Status check(std::span<const PageContent> pages) const;

  /// Host memory only: one page, in all buffers.
  void fill_page(const PageContent& page);
  [[nodiscard]] Status check_page(const PageContent& page) const;

 private:
  PatternPool(Geometry geometry, std::unique_ptr<StagingMemory> memory)
      : geometry_{std::move(geometry)}, memory_{std::move(memory)} {}
  [[nodiscard]] std::size_t buffer_bytes() const {
    return group().page_bytes() * group().page_count;
  }
  [[nodiscard]] std::span<std::byte> buffer(std::uint32_t number) const {
    return memory_->bytes().subspan(number * buffer_bytes(), buffer_bytes());
  }
  // Calls visit(row's offset in the page, its pattern) for each row of a page in one buffer.
  template <typename Visit>
  void each_row(std::uint32_t buffer, std::uint64_t content, const Visit& visit) const;
  void fill_page(std::span<std::byte> image, std::uint32_t buffer, const PageContent& page) const;
  [[nodiscard]] Status check_page(std::span<const std::byte> image, std::uint32_t buffer,
                                  const PageContent& page) const;

  Geometry geometry_;
  std::unique_ptr<StagingMemory> memory_;
};

}  // namespace kvshard::bench
