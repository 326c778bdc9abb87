#pragma once

#include "kvshard/transport.hpp"
#include "transport/ucx/handles.hpp"

namespace kvshard::ucx {

/// A context with the options that we need and that the user did not set (see context.cpp).
Result<UcpContext> create_context(const TransportOptions& options);
/// A worker for one thread at a time: UCS_THREAD_MODE_SERIALIZED, because the thread that makes a
/// rank is not the one that progresses it. UCP takes no locks in that mode; SINGLE would bind the
/// worker to the thread that made it, and with it every error of its making to the progress thread.
Result<UcpWorker> create_worker(ucp_context_h context);

}  // namespace kvshard::ucx
