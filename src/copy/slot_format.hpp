#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvshard/copy_engine.hpp"

// What lies around a slot's payload. kernels/slot_format.cuh says the same for the device; the GPU
// conformance test holds the two together.
namespace kvshard {

static_assert(std::endian::native == std::endian::little, "slots hold little-endian words");

inline constexpr std::uint64_t kSlotMagic = 0x3130'746f'6c73'766bULL;  // "kvslot01"

/// What the header of a slot begins with, and its trailer is: the same words twice.
struct SlotMark {
  std::uint64_t lease{0};
  std::uint64_t generation{0};
  std::uint64_t chunk{0};
  std::uint64_t payload_bytes{0};
  std::uint64_t checksum{0};
  std::uint64_t magic{kSlotMagic};
  std::uint64_t zeros[2]{};
};
static_assert(sizeof(SlotMark) <= kSlotHeaderBytes && sizeof(SlotMark) == kSlotTrailerBytes);

[[nodiscard]] constexpr std::uint64_t padded_payload_bytes(std::uint64_t payload_bytes) noexcept {
  return (payload_bytes + 15) / 16 * 16;
}

/// Writes header and trailer, and zeros the padding between payload and trailer.
void write_marks(std::byte* slot, const SlotStamp& stamp, std::uint64_t checksum) noexcept;

/// data_loss, naming the first word that differs, unless `found` holds `stamp` and the magic.
/// `place` is "header" or "trailer".
Status check_mark(const SlotMark& found, const SlotStamp& stamp, const char* place);
/// The same for both marks of a slot in host memory.
Status check_marks(const std::byte* slot, const SlotStamp& stamp);
/// data_loss unless both are equal.
Status check_checksum(std::uint64_t found, std::uint64_t expected);

inline constexpr std::uint64_t kChecksumStep =
    0x9e37'79b9'7f4a'7c15ULL;  // odd: 2^64 / golden ratio

/// What the 64-bit word at `index` of a padded payload adds to its checksum.
///
/// A sum of such terms can be taken in any order, by any number of threads, and yet depends on
/// where each word stood. The product mixes; the rotated word keeps a changed bit visible where the
/// other factor is 0. It finds stale and torn slots; it is no defence against a peer that wants to
/// collide.
[[nodiscard]] constexpr std::uint64_t checksum_term(std::uint64_t word,
                                                    std::uint64_t index) noexcept {
  const std::uint64_t mixed = word ^ ((index + 1) * kChecksumStep);
  return (mixed & 0xffff'ffffULL) * (mixed >> 32) + std::rotl(word, 32);
}

/// The sum of the terms of `words` words at `bytes`, the first of which has index `first`.
[[nodiscard]] inline std::uint64_t checksum_words(const std::byte* bytes, std::uint64_t first,
                                                  std::uint64_t words) noexcept {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < words; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * sizeof word, sizeof word);
    sum += checksum_term(word, first + i);
  }
  return sum;
}

}  // namespace kvshard
