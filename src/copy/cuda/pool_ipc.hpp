#pragma once

#include <memory>

#include "copy/pool_blob.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/pool_mapping.hpp"
#include "kvshard/result.hpp"

// Pools of device memory that another process maps: CUDA IPC.
namespace kvshard {

/// Device, allocations and buffers of `pool`, which lies on `device`.
/// Errors: unsupported, as export_pool() says.
Result<PoolBlob> describe_cuda_pool(const Pool& pool, int device);

/// Opens the allocations of another process's pool for kernels of `device`. check_holds() has accepted `blob`
/// and `geometry`; here the driver is asked whether the allocations are as large as the blob says.
/// Errors: as map_pool() says.
Result<std::unique_ptr<MappedPool>> map_cuda_pool(const PoolBlob& blob, const Geometry& geometry,
                                                  int device);

/// Lets kernels of `device` read memory of `owner`, both of this process.
/// Errors: unsupported when the two devices have no path.
Status allow_peer_access(int device, int owner);

}  // namespace kvshard
