#include "transport/ucx/handles.hpp"

#include <fmt/format.h>

namespace kvshard::ucx {
namespace {

ErrorCode code_of(ucs_status_t status) noexcept {
  switch (status) {
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
      return ErrorCode::invalid_argument;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
      return ErrorCode::resource_exhausted;
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
    case UCS_ERR_NO_DEVICE:
      return ErrorCode::unsupported;
    case UCS_ERR_CANCELED:
      return ErrorCode::cancelled;
    // A broken connection has many names, and which one comes depends on transport and timing.
    default:
      return ErrorCode::unavailable;
  }
}

}  // namespace

Error ucx_error(std::string_view what, ucs_status_t status) {
  return Error{code_of(status), fmt::format("{}: {}", what, ucs_status_string(status))};
}

}  // namespace kvshard::ucx
