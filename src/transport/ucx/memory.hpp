#pragma once

#include <span>
#include <vector>

#include "kvshard/transport.hpp"
#include "transport/ucx/handles.hpp"

namespace kvshard::ucx {

class UcxTransport;

/// Memory registered once with UCX, its kind said explicitly: UCX's own detection asks the CUDA
/// driver on each call, and is wrong for some kinds of allocation.
class UcxMemory final : public RegisteredMemory {
 public:
  UcxMemory(UcxTransport& transport, UcpMemory handle, std::span<std::byte> bytes, MemoryKind kind,
            std::vector<std::byte> packed) noexcept
      : transport_{transport},
        handle_{std::move(handle)},
        bytes_{bytes},
        kind_{kind},
        packed_{std::move(packed)} {}
  ~UcxMemory() override;
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept override { return bytes_; }
  [[nodiscard]] std::span<const std::byte> packed() const noexcept override { return packed_; }
  [[nodiscard]] ucp_mem_h handle() const noexcept { return handle_.get(); }
  [[nodiscard]] MemoryKind kind() const noexcept { return kind_; }
  [[nodiscard]] const UcxTransport& transport() const noexcept { return transport_; }
  [[nodiscard]] bool contains(std::span<const std::byte> part) const noexcept {
    return part.data() >= bytes_.data() &&
           part.data() + part.size() <= bytes_.data() + bytes_.size();
  }

 private:
  UcxTransport& transport_;
  UcpMemory handle_;
  std::span<std::byte> bytes_;
  MemoryKind kind_;
  std::vector<std::byte> packed_;
};

/// What a peer needs to know of the memory that it fetches from.
struct RemoteMemory {
  std::uint64_t address{0};
  std::uint64_t bytes{0};
  MemoryKind kind{MemoryKind::host};
  std::span<const std::byte> rkey;  ///< part of the sealed bytes
};

/// Registers and packs. Errors: unsupported when UCX has no support for that kind of memory.
Result<UcpMemory> map_memory(ucp_context_h context, std::span<std::byte> bytes, MemoryKind kind);
Result<std::vector<std::byte>> pack_memory(ucp_context_h context, ucp_mem_h memory,
                                           std::span<const std::byte> bytes, MemoryKind kind);
/// Checks and takes apart what pack_memory() made on a peer.
Result<RemoteMemory> unpack_memory(std::span<const std::byte> sealed);

/// Tells UCX about a local buffer what it would otherwise have to find out on each call.
inline void describe_memory(ucp_request_param_t& param, ucp_mem_h memory,
                            MemoryKind kind) noexcept {
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH;
  param.memory_type = kind == MemoryKind::cuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  param.memh = memory;
}

}  // namespace kvshard::ucx
