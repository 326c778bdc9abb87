#include "control/authority.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "base/try.hpp"

namespace kvshard {

Result<Authority> Authority::create(const SecurityOptions& options) {
  if (options.secret_file.empty()) {
    if (options.allow_unauthenticated_network) {
      log::warning(
          "no secret: whoever reaches this rank's network may pull any room; "
          "set security.secret_file");
    }
    return Authority{std::nullopt, options.allow_unauthenticated_network};
  }
  KVSHARD_TRY(auto file, SecretFile::open(options.secret_file));
  return Authority{std::move(file), true};
}

Status Authority::check(const SocketAddress& address) const {
  if (any_address_ || address.is_loopback()) return {};
  return Error{ErrorCode::invalid_argument,
               fmt::format("{} is no loopback address, and there is no secret: set "
                           "security.secret_file, or security.allow_unauthenticated_network",
                           address.to_string())};
}

}  // namespace kvshard
