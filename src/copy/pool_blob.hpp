#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/geometry.hpp"
#include "kvshard/pool_mapping.hpp"
#include "kvshard/result.hpp"
#include "kvshard/types.hpp"

// What an export says, and its bytes. Pure, but for this_process().
namespace kvshard {

/// Where an export was made. CUDA IPC reaches processes of the same kernel and the same namespaces.
struct ProcessIdentity {
  std::array<char, 36> boot_id{};  ///< of the running kernel, as text
  std::uint64_t ipc_namespace{0};
  std::uint64_t pid_namespace{0};
  std::uint64_t pid{0};
  std::uint64_t nonce{0};  ///< tells a process from one that had its pid before

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

/// Errors: unsupported when /proc does not tell.
Result<ProcessIdentity> this_process();
/// Errors: unsupported, naming what differs, unless both are on one host and in the same namespaces.
Status check_same_host(const ProcessIdentity& exporter, const ProcessIdentity& importer);

/// An export. Host memory has no allocations and no buffers here.
struct PoolBlob {
  /// One allocation of device memory.
  struct Allocation {
    std::array<std::byte, 64> handle{};  ///< cudaIpcMemHandle_t
    std::uint64_t bytes{0};

    friend bool operator==(const Allocation&, const Allocation&) = default;
  };
  /// A pool buffer, in the order of Pool::buffers through all groups.
  struct Buffer {
    std::uint16_t allocation{0};
    std::uint64_t offset{0};  ///< from the allocation's start

    friend bool operator==(const Buffer&, const Buffer&) = default;
  };

  MemoryKind memory{MemoryKind::host};
  ProcessIdentity process;
  std::uint64_t export_id{0};  ///< the exporting process's own name for it
  std::array<std::byte, 16> device_uuid{};
  std::vector<Allocation> allocations;
  std::vector<Buffer> buffers;

  friend bool operator==(const PoolBlob&, const PoolBlob&) = default;
};

/// Errors: unsupported, with the numbers, for more than kMaxPoolExportBytes.
Result<std::vector<std::byte>> encode(const PoolBlob& blob);
/// Errors: invalid_argument naming the field: truncated, bytes left over, out of range. What is accepted
/// encodes to the same bytes.
Result<PoolBlob> decode_pool_blob(std::span<const std::byte> bytes);

/// Whether every page of `geometry`, which validate() accepts, lies within the allocations.
/// Errors: invalid_argument with the numbers.
Status check_holds(const PoolBlob& blob, const Geometry& geometry);

}  // namespace kvshard
