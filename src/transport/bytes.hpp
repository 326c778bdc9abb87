#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

// Little-endian fields of the few fixed-size records that transports exchange. Messages between
// ranks are wire's; these are below it.
namespace kvshard::transport {

class ByteWriter {
 public:
  ByteWriter& u32(std::uint32_t value) { return integer(value, 4); }
  ByteWriter& u64(std::uint64_t value) { return integer(value, 8); }
  ByteWriter& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::vector<std::byte> take() && noexcept { return std::move(bytes_); }

 private:
  ByteWriter& integer(std::uint64_t value, unsigned width) {
    for (unsigned i = 0; i < width; ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
    return *this;
  }

  std::vector<std::byte> bytes_;
};

/// Reads past the end give 0 and turn ok() false, for good: one check after the last field is
/// enough.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) noexcept : rest_{bytes} {}

  std::uint32_t u32() noexcept { return static_cast<std::uint32_t>(integer(4)); }
  std::uint64_t u64() noexcept { return integer(8); }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return rest_; }
  [[nodiscard]] bool ok() const noexcept { return ok_; }

 private:
  std::uint64_t integer(std::size_t width) noexcept {
    if (rest_.size() < width) {
      ok_ = false;
      rest_ = {};
      return 0;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i)
      value |= static_cast<std::uint64_t>(rest_[i]) << (8 * i);
    rest_ = rest_.subspan(width);
    return value;
  }

  std::span<const std::byte> rest_;
  bool ok_{true};
};

}  // namespace kvshard::transport
