#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string_view>

#include "kvshard/result.hpp"

// One move-only owner per UCP handle; null is the empty state.
namespace kvshard::ucx {

struct ContextDeleter {
  void operator()(ucp_context_h context) const noexcept { ucp_cleanup(context); }
};
struct WorkerDeleter {
  void operator()(ucp_worker_h worker) const noexcept { ucp_worker_destroy(worker); }
};
struct RkeyDeleter {
  void operator()(ucp_rkey_h rkey) const noexcept { ucp_rkey_destroy(rkey); }
};
struct MemoryDeleter {
  ucp_context_h context{nullptr};
  void operator()(ucp_mem_h memory) const noexcept { (void)ucp_mem_unmap(context, memory); }
};

using UcpContext = std::unique_ptr<ucp_context, ContextDeleter>;
using UcpWorker = std::unique_ptr<ucp_worker, WorkerDeleter>;
using UcpRkey = std::unique_ptr<ucp_rkey, RkeyDeleter>;
using UcpMemory = std::unique_ptr<ucp_mem, MemoryDeleter>;
// An endpoint has no deleter of its own: closing one takes time and callbacks. See connection.hpp.

/// "<what>: <UCX's text>", with the code that tells a caller what to do next.
Error ucx_error(std::string_view what, ucs_status_t status);

}  // namespace kvshard::ucx
