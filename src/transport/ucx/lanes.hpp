#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <string_view>
#include <vector>

#include "kvshard/types.hpp"

namespace kvshard::ucx {

/// The transports ("tcp", "rc_mlx5", "cuda_ipc", ...) that a connected endpoint uses, each once, in
/// the order of its lanes. Read from ucp_ep_print_info(), whose lane lines have had one form
/// from 1.13 to 1.22; ucp_ep_query() tells the same only from 1.14 on. Empty when the form is not
/// known.
std::vector<std::string> transports_of(ucp_ep_h endpoint);
std::vector<std::string> parse_transports(std::string_view endpoint_info);

/// Whether hardware (or the kernel) can read a peer's memory of kind `from` into ours of kind `to`
/// over this transport without the peer's process. tcp and ud cannot, cuda_ipc only between GPUs and
/// cma only between hosts' memory; UCX then emulates a get by active messages.
bool reads_natively(std::string_view transport, MemoryKind from, MemoryKind to) noexcept;

}  // namespace kvshard::ucx
