#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvshard::bench {

/// What lies in a pool, byte by byte: each row (one token's one head in one buffer) is a function of the
/// page's content number, the buffer, the token within the page, and the head, as the model numbers them.
/// Words of 8 bytes, since whole pools are filled and compared; rows are multiples of that.
struct RowPattern {
  std::uint64_t content{0};
  std::uint32_t buffer{0};  ///< layer * buffers_per_layer + buffer
  std::uint32_t token{0};
  std::uint32_t head{0};

  void fill(std::span<std::byte> row) const {
    const std::uint64_t key = this->key();
    for (std::size_t i = 0; i < row.size(); i += 8) {
      const std::uint64_t word = word_at(key, i);
      std::memcpy(row.data() + i, &word, 8);
    }
  }
  [[nodiscard]] bool is_in(std::span<const std::byte> row) const {
    const std::uint64_t key = this->key();
    std::uint64_t wrong = 0;  // no branch in the loop, so that it vectorises
    for (std::size_t i = 0; i < row.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, row.data() + i, 8);
      wrong |= word ^ word_at(key, i);
    }
    return wrong == 0;
  }

 private:
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15U;
    return x ^ (x >> 29);
  }
  [[nodiscard]] std::uint64_t key() const {
    return mix(mix(content + 1) + buffer * 0xbf58476d1ce4e5b9U +
               ((std::uint64_t{token} << 32) | head) * 0x94d049bb133111ebU);
  }
  static constexpr std::uint64_t word_at(std::uint64_t key, std::size_t at) {
    const std::uint64_t word = key + at * 0xd6e8feb86659fd93U;
    return word ^ (word >> 32);
  }
};

}  // namespace kvshard::bench
