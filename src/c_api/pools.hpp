#pragma once

#include <memory>

#include "kvshard/copy_engine.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/kvshard.h"
#include "kvshard/registry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/transport.hpp"

// Structs of the C API as the C++ ones that they stand for.
namespace kvshard::c_api {

/// Without looking at buffers. Not validated.
Result<Geometry> to_geometry(const kvshard_pool& pool);
/// Errors: also those of validate(Geometry), and of too few or too many buffers.
Result<Pool> to_pool(const kvshard_pool* pool);

struct Backend {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<CopyEngine> engine;
};
/// Null is UCX and host memory.
Result<Backend> make_backend(const kvshard_backend* backend);

kvshard_group_member from_member(const GroupMember& member) noexcept;
Result<GroupSpec> to_group(const kvshard_group_spec* group);

}  // namespace kvshard::c_api
