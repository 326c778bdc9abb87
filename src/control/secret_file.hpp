#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "control/hmac.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// What peers may prove that they know. The first proves who we are. Never empty.
using Secrets = std::vector<HmacKey>;

/// The file of SecurityOptions::secret_file.
///
/// Threads: one at a time.
class SecretFile {
 public:
  static constexpr std::size_t kMinSecretBytes = 16;
  static constexpr std::size_t kMaxSecretBytes = 4096;
  static constexpr std::size_t kMaxSecrets = 2;

  /// Errors: invalid_argument naming the file, and its mode, line or size; never what it holds.
  static Result<SecretFile> open(std::string path);

  /// The secrets as the file has them now. When it cannot be used any more, the last ones, and a
  /// warning, once for each state of the file.
  [[nodiscard]] std::shared_ptr<Secrets> current();

 private:
  SecretFile(std::string path, std::shared_ptr<Secrets> secrets, const struct stat& state)
      : path_{std::move(path)}, secrets_{std::move(secrets)}, state_{state} {}

  std::string path_;
  std::shared_ptr<Secrets> secrets_;
  struct stat state_;  // of the file when it was last looked at; zeros: it was not there
};

}  // namespace kvshard
