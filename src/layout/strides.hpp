#pragma once

#include <cstdint>

#include "kvshard/geometry.hpp"

namespace kvshard {

// A group's strides in bytes, with the packed ones filled in.
struct Strides {
  std::uint64_t token;
  std::uint64_t head;
  std::uint64_t page;
};

// Requires that page_bytes() does not wrap.
[[nodiscard]] Strides strides(const BufferGroup& group) noexcept;

}  // namespace kvshard
