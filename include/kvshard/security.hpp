#pragma once

#include <string>

namespace kvshard {

/// Who may talk to a rank on its control connections. See docs/security.md.
///
/// With a secret, both sides of a connection prove that they know it before anything else is said, and every
/// message carries a MAC. Nothing is encrypted. Both sides need the file, or neither.
struct SecurityOptions {
  /// A regular file, closed to others and not writable by the group, with one or two secrets: lines of
  /// 16 to 4096 bytes. The first one proves who we are; both are accepted from peers. The file is looked
  /// at again for each new connection, so that secrets are changed without a restart; while it cannot be
  /// used, the last good ones stay. Empty: no secret, and only loopback addresses.
  std::string secret_file;
  /// Lets a rank without a secret use addresses that are not loopback: whoever reaches the port may then
  /// pull any room. Logged as a warning at start.
  bool allow_unauthenticated_network{false};
};

}  // namespace kvshard
