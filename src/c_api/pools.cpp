#include "c_api/pools.hpp"

#include <fmt/format.h>

#include <cstring>
#include <span>
#include <utility>

#include "c_api/boundary.hpp"
#include "kvshard/plan.hpp"

namespace kvshard::c_api {
namespace {

Result<BufferGroup> to_buffer_group(const kvshard_buffer_group& group) {
  BufferGroup made;
  if (group.name != nullptr) made.name = group.name;
  if (group.element_type != 0) {
    KVSHARD_TRY(made.element_type,
                to_enum(group.element_type, ElementType::f32, ElementType::u8, "element_type"));
  }
  if (group.order != 0) {
    KVSHARD_TRY(made.order,
                to_enum(group.order, PageOrder::token_major, PageOrder::head_major, "order"));
  }
  made.layers = group.layers;
  set_option(made.buffers_per_layer, group.buffers_per_layer);
  made.heads = group.heads;
  made.head_bytes = group.head_bytes;
  made.page_size = group.page_size;
  made.token_stride = group.token_stride;
  made.head_stride = group.head_stride;
  made.page_stride = group.page_stride;
  made.page_count = group.page_count;
  made.table = group.table;
  set_option(made.parts, group.parts);
  made.part = group.part;
  made.interleave = group.interleave;
  made.first_head = group.first_head;
  made.total_heads = group.total_heads;
  made.first_layer = group.first_layer;
  made.total_layers = group.total_layers;
  return made;
}

}  // namespace

Result<Geometry> to_geometry(const kvshard_pool& pool) {
  Geometry geometry;
  geometry.model_id = text_or(pool.model_id, "");
  geometry.rank = pool.rank;
  set_option(geometry.ranks, pool.ranks);
  if (pool.group_count > kMaxBufferGroups) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("group_count {} is above {}", pool.group_count, kMaxBufferGroups)};
  }
  KVSHARD_TRY(const auto groups, read_array(pool.groups, pool.group_count, "kvshard_buffer_group"));
  for (const kvshard_buffer_group& group : groups) {
    KVSHARD_TRY(BufferGroup made, to_buffer_group(group));
    geometry.groups.push_back(std::move(made));
  }
  return geometry;
}

Result<Pool> to_pool(const kvshard_pool* given) {
  KVSHARD_TRY(const kvshard_pool pool, read(given, "kvshard_pool"));
  KVSHARD_TRY(required_array(pool.buffers, pool.buffer_count, "buffers"));
  Pool made;
  KVSHARD_TRY(made.geometry, to_geometry(pool));
  KVSHARD_TRY(validate(made.geometry));  // bounds the products below
  std::uint64_t needed = 0;
  for (const BufferGroup& group : made.geometry.groups) needed += group.buffers();
  if (needed != pool.buffer_count) {
    return Error{
        ErrorCode::invalid_argument,
        fmt::format("buffer_count {}, but the groups have {} buffers", pool.buffer_count, needed)};
  }
  std::size_t next = 0;
  for (const BufferGroup& group : made.geometry.groups) {
    auto& buffers = made.buffers.emplace_back();
    for (std::uint32_t b = 0; b < group.buffers(); ++b)
      buffers.push_back(static_cast<std::byte*>(pool.buffers[next++]));
  }
  return made;
}

Result<Backend> make_backend(const kvshard_backend* given) {
  kvshard_backend backend{};
  if (given != nullptr) {
    KVSHARD_TRY(backend, read(given, "kvshard_backend"));
  }
  TransportOptions transport;
  KVSHARD_TRY(transport.kind, to_enum(backend.transport, TransportOptions::Kind::ucx,
                                      TransportOptions::Kind::loopback, "transport"));
  KVSHARD_TRY(transport.path,
              to_enum(backend.path, TransferPath::automatic, TransferPath::am, "path"));
  transport.require_native = backend.require_native != 0;

  CopyEngineOptions copy;
  if (backend.memory != 0) {
    KVSHARD_TRY(copy.memory, to_enum(backend.memory, MemoryKind::host, MemoryKind::cuda, "memory"));
  }
  if (copy.memory == MemoryKind::cuda) transport.cuda_device = backend.cuda_device;
  set_option(copy.host_threads, backend.host_threads);
  copy.cuda_device = backend.cuda_device;
  copy.cuda_max_sms = backend.cuda_max_sms;
  copy.cuda_high_priority = backend.cuda_high_priority != 0;

  Backend made;
  KVSHARD_TRY(made.engine, make_copy_engine(copy));
  KVSHARD_TRY(made.transport, make_transport(transport));
  return made;
}

kvshard_group_member from_member(const GroupMember& member) noexcept {
  kvshard_group_member made{};
  made.shard_rank = member.shard_rank;
  made.incarnation = member.incarnation;
  made.port = member.port;
  static_assert(sizeof made.host > kMaxHostBytes);
  copy_text(member.host, made.host, sizeof made.host);
  return made;
}

Result<GroupSpec> to_group(const kvshard_group_spec* given) {
  KVSHARD_TRY(const kvshard_group_spec group, read(given, "kvshard_group_spec"));
  if (group.member_count > kMaxShardSize) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("member_count {} is above {}", group.member_count, kMaxShardSize)};
  }
  KVSHARD_TRY(const auto members, read_array<kvshard_group_member>(
                                      group.members, group.member_count, "kvshard_group_member"));
  GroupSpec made{.name = text_or(group.name, ""), .epoch = group.epoch, .members = {}};
  for (const kvshard_group_member& member : members) {
    const std::size_t bytes = strnlen(member.host, sizeof member.host);
    if (bytes == sizeof member.host) {
      return Error{ErrorCode::invalid_argument,
                   fmt::format("the host of shard rank {} is not terminated", member.shard_rank)};
    }
    KVSHARD_TRY(const std::uint16_t port, to_port(member.port));
    made.members.push_back({.shard_rank = member.shard_rank,
                            .host = std::string{member.host, bytes},
                            .port = port,
                            .incarnation = member.incarnation});
  }
  return made;
}

}  // namespace kvshard::c_api

using namespace kvshard;

namespace {

Result<std::vector<Geometry>> to_geometries(const kvshard_pool* pools, std::uint32_t count) {
  KVSHARD_TRY(const auto given, c_api::read_array(pools, count, "kvshard_pool"));
  std::vector<Geometry> made;
  for (const kvshard_pool& pool : given) {
    KVSHARD_TRY(Geometry geometry, c_api::to_geometry(pool));
    made.push_back(std::move(geometry));
  }
  return made;
}

}  // namespace

int32_t kvshard_count_pullers(const kvshard_pool* prefill, uint32_t prefill_count,
                              const kvshard_pool* decode, uint32_t decode_count, uint32_t* pullers,
                              kvshard_error* error) {
  return c_api::guarded(error, [&]() -> Status {
    KVSHARD_TRY(c_api::required_array(pullers, prefill_count, "pullers"));
    KVSHARD_TRY(const auto from, to_geometries(prefill, prefill_count));
    KVSHARD_TRY(const auto to, to_geometries(decode, decode_count));
    KVSHARD_TRY(const auto counts, count_pullers(from, to));
    std::copy(counts.begin(), counts.end(), pullers);
    return {};
  });
}
