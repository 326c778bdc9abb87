#include "transport/ucx/memory.hpp"

#include <fmt/format.h>

#include <bit>

#include "base/try.hpp"
#include "transport/bytes.hpp"
#include "transport/envelope.hpp"

namespace kvshard::ucx {
namespace {

std::string_view name_of(MemoryKind kind) noexcept {
  return kind == MemoryKind::cuda ? "cuda" : "host";
}

}  // namespace

Result<UcpMemory> map_memory(ucp_context_h context, std::span<std::byte> bytes, MemoryKind kind) {
  if (bytes.empty()) return Error{ErrorCode::invalid_argument, "no bytes to register"};
  ucp_context_attr_t supported{};
  supported.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (const auto status = ucp_context_query(context, &supported); status != UCS_OK)
    return ucx_error("ucp_context_query", status);
  const auto type = kind == MemoryKind::cuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  if ((supported.memory_types & UCS_BIT(type)) == 0)
    return Error{ErrorCode::unsupported,
                 fmt::format("this UCX has no support for {} memory (it has types {:#x})",
                             name_of(kind), supported.memory_types)};

  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = bytes.data();
  params.length = bytes.size();
  params.memory_type = type;
  ucp_mem_h memory = nullptr;
  if (const auto status = ucp_mem_map(context, &params, &memory); status != UCS_OK)
    return ucx_error(
        fmt::format("ucp_mem_map of {} bytes of {} memory", bytes.size(), name_of(kind)), status);
  return UcpMemory{memory, MemoryDeleter{context}};
}

Result<std::vector<std::byte>> pack_memory(ucp_context_h context, ucp_mem_h memory,
                                           std::span<const std::byte> bytes, MemoryKind kind) {
  void* rkey = nullptr;
  std::size_t rkey_bytes = 0;
  if (const auto status = ucp_rkey_pack(context, memory, &rkey, &rkey_bytes); status != UCS_OK)
    return ucx_error("ucp_rkey_pack", status);
  const std::unique_ptr<void, decltype(&ucp_rkey_buffer_release)> owned{rkey,
                                                                        &ucp_rkey_buffer_release};
  transport::ByteWriter out;
  out.u64(std::bit_cast<std::uintptr_t>(bytes.data())).u64(bytes.size());
  out.u32(kind == MemoryKind::cuda ? 1 : 0);
  out.raw({static_cast<const std::byte*>(rkey), rkey_bytes});
  return transport::seal(transport::EnvelopeKind::ucx_memory, out.bytes());
}

Result<RemoteMemory> unpack_memory(std::span<const std::byte> sealed) {
  KVSHARD_TRY(const auto payload, transport::unseal(transport::EnvelopeKind::ucx_memory, sealed));
  transport::ByteReader in{payload};
  const auto address = in.u64();
  const auto bytes = in.u64();
  const auto kind = in.u32();
  if (!in.ok() || in.rest().empty())
    return Error{ErrorCode::data_loss,
                 fmt::format("peer's memory in {} bytes: no rkey", payload.size())};
  if (address + bytes < address)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("peer's memory of {} bytes at {:#x} wraps around", bytes, address)};
  if (kind > 1)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("peer's memory is of kind {}, known are 0 (host) and 1 (cuda)", kind)};
  return RemoteMemory{.address = address,
                      .bytes = bytes,
                      .kind = kind == 1 ? MemoryKind::cuda : MemoryKind::host,
                      .rkey = in.rest()};
}

}  // namespace kvshard::ucx
