#pragma once

#include <memory>

#include "kvshard/transport.hpp"

namespace kvshard::loopback {

/// A transport between ranks of one process, which may run on different threads: a fetch is a
/// memcpy from the owner's memory inside the fetcher's progress(). Destroying the owner's transport
/// or memory waits for a memcpy under way, so a fetch never reads freed memory.
///
/// Threads: each transport is worker-bound; different transports may be on different threads.
/// Errors:  register_memory() and probe() give unsupported for CUDA memory and for a forced ucx
/// path.
Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options);

}  // namespace kvshard::loopback
