#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "kvshard/export.hpp"
#include "kvshard/geometry.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

namespace kvshard {

/// An export is not longer: as much as one field of the control protocol holds.
inline constexpr std::size_t kMaxPoolExportBytes = std::size_t{16} << 10;

/// What a peer needs to map a pool, and this process's promise to honour it.
///
/// Owns:    the description; not the pool, which must not be freed before every mapping of it is gone. (To
///          CUDA, freeing exported memory that is mapped elsewhere is undefined behaviour.)
/// Threads: thread-compatible.
class KVSHARD_EXPORT PoolExport {
 public:
  /// From here on map_pool() of this process refuses the bytes. What is mapped stays so.
  virtual ~PoolExport() = default;
  /// Opaque, for map_pool() in a peer; at most kMaxPoolExportBytes.
  [[nodiscard]] virtual std::span<const std::byte> bytes() const noexcept = 0;
};

/// A peer's pool, readable here: what CopyJob::sources of a pull point into.
///
/// Owns:    the mapping, which the destructor closes: no copy that reads from it may be in flight then.
///          Mappings of one pool are independent, though they share addresses; each is closed by itself.
///          A peer that dies takes nothing away: the memory stays, with what was last written to it, until
///          the mapping is closed. What CUDA's manual leaves open there, a GPU test shows.
/// Threads: thread-compatible; made and destroyed on any thread.
/// Cost:    to close, a call into the driver for each allocation, which may wait for the device.
class KVSHARD_EXPORT MappedPool {
 public:
  virtual ~MappedPool() = default;
  /// The geometry given to map_pool(), and where the buffers are here. Only to be read.
  [[nodiscard]] virtual const Pool& pool() const noexcept = 0;
  /// How it is mapped, for a log.
  [[nodiscard]] virtual std::string_view description() const noexcept = 0;
};

/// Describes `pool`, in memory of that kind, to peers on this host. For CUDA each allocation is exported once,
/// however many buffers it holds. Whoever on this host has the bytes can read and write all of an allocation,
/// not only the pool's part, since CUDA IPC has nothing smaller: they belong on authenticated connections.
///
/// Errors:  invalid_argument as validate() says; unsupported, with the reason, for what a peer could not map:
///          memory of an async pool, of the virtual memory API, of another device or none; too many
///          allocations or buffers for kMaxPoolExportBytes; a host that cannot be told from others; a build
///          or machine without CUDA.
/// Cost:    some driver calls for each buffer; made once for each pool.
/// Source:  docs/architecture.md, "Mapped pools".
KVSHARD_EXPORT Result<std::unique_ptr<PoolExport>> export_pool(const Pool& pool, MemoryKind memory,
                                                               int cuda_device);

/// Maps a peer's pool of that `geometry` for copies by an engine of `memory` and, with CUDA, of
/// `cuda_device`. Pools of this same process are not mapped but used where they are: the only way for
/// host memory. The bytes are not trusted: a mapping covers every page that `geometry` has.
///
/// Errors:  invalid_argument, naming the field, for bytes that are no export or do not hold `geometry`;
///          failed_precondition when the export is gone or of another geometry; unsupported, with the reason,
///          where mapping does not work: another host or namespace, host memory of another process, no peer
///          access between the devices, a refusal of the driver. All but the first are no fault of the peer:
///          pull through slots instead.
/// Cost:    calls into the driver for each allocation, which may take milliseconds: not for a busy progress
///          thread.
KVSHARD_EXPORT Result<std::unique_ptr<MappedPool>> map_pool(std::span<const std::byte> bytes,
                                                            const Geometry& geometry,
                                                            MemoryKind memory, int cuda_device);

}  // namespace kvshard
