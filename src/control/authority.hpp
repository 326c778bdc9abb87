#pragma once

#include <memory>
#include <optional>

#include "control/connection.hpp"
#include "control/secret_file.hpp"
#include "kvshard/security.hpp"

namespace kvshard {

/// What a rank's SecurityOptions came to.
///
/// Threads: check() on any, secrets() on the progress thread.
class Authority {
 public:
  /// Warns when an unauthenticated network is allowed. Errors: those of the secret file.
  static Result<Authority> create(const SecurityOptions& options);

  /// Whether this address may be listened on or connected to. Errors: invalid_argument.
  [[nodiscard]] Status check(const SocketAddress& address) const;
  /// For a new connection; null: it proves nothing.
  [[nodiscard]] std::shared_ptr<Secrets> secrets() { return file_ ? file_->current() : nullptr; }

 private:
  Authority(std::optional<SecretFile> file, bool any_address)
      : file_{std::move(file)}, any_address_{any_address} {}

  std::optional<SecretFile> file_;
  bool any_address_;
};

}  // namespace kvshard
