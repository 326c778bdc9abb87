#include "copy/slot_format.hpp"

#include <fmt/format.h>

#include "base/try.hpp"

namespace kvshard {

void write_marks(std::byte* slot, const SlotStamp& stamp, std::uint64_t checksum) noexcept {
  const SlotMark mark{.lease = stamp.lease,
                      .generation = stamp.generation,
                      .chunk = stamp.chunk,
                      .payload_bytes = stamp.payload_bytes,
                      .checksum = checksum};
  const std::uint64_t padded = padded_payload_bytes(stamp.payload_bytes);
  std::byte* const payload = slot + kSlotHeaderBytes;
  std::memcpy(slot, &mark, sizeof mark);
  std::memset(slot + sizeof mark, 0, kSlotHeaderBytes - sizeof mark);
  std::memset(payload + stamp.payload_bytes, 0, padded - stamp.payload_bytes);
  std::memcpy(payload + padded, &mark, sizeof mark);
}

Status check_mark(const SlotMark& found, const SlotStamp& stamp, const char* place) {
  const auto differs = [place](const char* field, std::uint64_t have, std::uint64_t want) {
    return Error{ErrorCode::data_loss,
                 fmt::format("slot {} holds {} {}, expected {}", place, field, have, want)};
  };
  if (found.magic != kSlotMagic) return differs("magic", found.magic, kSlotMagic);
  if (found.lease != stamp.lease) return differs("lease", found.lease, stamp.lease);
  if (found.generation != stamp.generation)
    return differs("generation", found.generation, stamp.generation);
  if (found.chunk != stamp.chunk) return differs("chunk", found.chunk, stamp.chunk);
  if (found.payload_bytes != stamp.payload_bytes)
    return differs("payload_bytes", found.payload_bytes, stamp.payload_bytes);
  return {};
}

Status check_marks(const std::byte* slot, const SlotStamp& stamp) {
  SlotMark header;
  SlotMark trailer;
  std::memcpy(&header, slot, sizeof header);
  std::memcpy(&trailer, slot + kSlotHeaderBytes + padded_payload_bytes(stamp.payload_bytes),
              sizeof trailer);
  KVSHARD_TRY(check_mark(header, stamp, "header"));
  return check_mark(trailer, stamp, "trailer");
}

Status check_checksum(std::uint64_t found, std::uint64_t expected) {
  if (found == expected) return {};
  return Error{ErrorCode::data_loss,
               fmt::format("slot checksum {:#x}, its bytes give {:#x}", found, expected)};
}

}  // namespace kvshard
