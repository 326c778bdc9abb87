#include "kvshard/transport.hpp"
#include "transport/loopback/loopback_transport.hpp"
#ifdef KVSHARD_HAVE_UCX
#include "transport/ucx/ucx_transport.hpp"
#endif

namespace kvshard {

std::string_view to_string(TransferPath path) noexcept {
  switch (path) {
    case TransferPath::automatic:
      return "automatic";
    case TransferPath::get:
      return "get";
    case TransferPath::am:
      return "am";
    case TransferPath::loopback:
      return "loopback";
    case TransferPath::mapped:
      return "mapped";
  }
  return "unknown";
}

Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options) {
  switch (options.kind) {
    case TransportOptions::Kind::loopback:
      return loopback::make_transport(options);
    case TransportOptions::Kind::ucx:
#ifdef KVSHARD_HAVE_UCX
      return ucx::make_transport(options);
#else
      return Error{ErrorCode::unsupported, "this build of kvshard has no UCX"};
#endif
  }
  return Error{ErrorCode::invalid_argument, "unknown transport kind"};
}

}  // namespace kvshard
