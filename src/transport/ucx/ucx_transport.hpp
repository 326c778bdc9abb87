#pragma once

#include <memory>

#include "kvshard/transport.hpp"

namespace kvshard::ucx {

/// A transport over UCX, 1.13 to 1.22. See docs/architecture.md, "Transports".
Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options);

}  // namespace kvshard::ucx
