#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/types.hpp"

namespace kvshard::test {

/// Whose bytes a page holds. Each byte is a function of (request, generation, position, buffer, offset),
/// so that a page in the wrong place, or of another time, is never mistaken.
struct Content {
  std::uint64_t request{0};
  std::uint64_t generation{0};
};

inline std::byte content_byte(const Content& content, std::uint32_t position, std::uint32_t buffer,
                              std::uint64_t offset) {
  std::uint64_t x = content.request * 0x9e3779b97f4a7c15U ^
                    content.generation * 0xc2b2ae3d27d4eb4fU ^
                    (std::uint64_t{position} << 32 | buffer) * 0x165667b19e3779f9U ^
                    (offset / 8 + 1) * 0xd6e8feb86659fd93U;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93U;
  x ^= x >> 29;
  return static_cast<std::byte>(x >> (offset % 8 * 8));
}

inline constexpr std::byte kCanary{0xc5};

/// A small latent or grouped geometry.
inline Geometry small_geometry(std::uint32_t page_count, std::uint32_t layers = 3,
                               std::uint32_t buffers_per_layer = 2, std::uint32_t page_size = 4,
                               std::uint32_t heads = 2, std::uint32_t head_bytes = 16) {
  return {.model_id = "test",
          .groups = {{.name = "kv",
                      .layers = layers,
                      .buffers_per_layer = buffers_per_layer,
                      .element_type = ElementType::f32,
                      .heads = heads,
                      .head_bytes = head_bytes,
                      .page_size = page_size,
                      .page_count = page_count}}};
}

/// The same, as rank `part` of `parts` that share the tokens by page holds it.
inline Geometry by_page(Geometry geometry, std::uint32_t part, std::uint32_t parts) {
  for (BufferGroup& group : geometry.groups) {
    group.parts = parts;
    group.part = part;
  }
  return geometry;
}

/// Host memory for a geometry, filled with canaries; packed pages only.
class PatternedPool {
 public:
  explicit PatternedPool(Geometry geometry) : geometry_{std::move(geometry)} {
    for (const BufferGroup& group : geometry_.groups) {
      for (std::uint32_t b = 0; b < group.buffers(); ++b) {
        page_bytes_.push_back(group.page_bytes());
        memory_.emplace_back(group.page_bytes() * group.page_count, kCanary);
      }
    }
  }

  [[nodiscard]] Pool pool() {
    Pool pool{geometry_, {}};
    std::size_t next = 0;
    for (const BufferGroup& group : geometry_.groups) {
      auto& pointers = pool.buffers.emplace_back();
      for (std::uint32_t b = 0; b < group.buffers(); ++b)
        pointers.push_back(memory_[next++].data());
    }
    return pool;
  }
  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] std::uint32_t buffers() const { return static_cast<std::uint32_t>(memory_.size()); }

  /// Writes a page as position `position` of `content`, in buffers [first, first + count).
  void fill(LocalPage page, std::uint32_t position, const Content& content, std::uint32_t first = 0,
            std::uint32_t count = UINT32_MAX) {
    for (std::uint32_t b = first; b < buffers() && b - first < count; ++b) {
      std::byte* const start = memory_[b].data() + index(page) * page_bytes_[b];
      for (std::uint64_t i = 0; i < page_bytes_[b]; ++i)
        start[i] = content_byte(content, position, b, i);
    }
  }
  void wipe(LocalPage page) {
    for (std::uint32_t b = 0; b < buffers(); ++b)
      std::memset(memory_[b].data() + index(page) * page_bytes_[b], static_cast<int>(kCanary),
                  page_bytes_[b]);
  }

  [[nodiscard]] ::testing::AssertionResult holds(LocalPage page, std::uint32_t position,
                                                 const Content& content) const {
    for (std::uint32_t b = 0; b < buffers(); ++b) {
      const std::byte* const start = memory_[b].data() + index(page) * page_bytes_[b];
      for (std::uint64_t i = 0; i < page_bytes_[b]; ++i) {
        if (start[i] == content_byte(content, position, b, i)) continue;
        return ::testing::AssertionFailure()
               << "page " << index(page) << " position " << position << " buffer " << b << " byte "
               << i << (start[i] == kCanary ? " is a canary" : " is wrong");
      }
    }
    return ::testing::AssertionSuccess();
  }
  [[nodiscard]] ::testing::AssertionResult untouched(LocalPage page) const {
    for (std::uint32_t b = 0; b < buffers(); ++b) {
      const std::byte* const start = memory_[b].data() + index(page) * page_bytes_[b];
      for (std::uint64_t i = 0; i < page_bytes_[b]; ++i) {
        if (start[i] != kCanary)
          return ::testing::AssertionFailure()
                 << "page " << index(page) << " buffer " << b << " byte " << i << " was written";
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  Geometry geometry_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::uint64_t> page_bytes_;
};

}  // namespace kvshard::test
