#include "control/secret_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "base/try.hpp"
#include "base/unique_fd.hpp"

namespace kvshard {
namespace {

constexpr std::byte kNewline{'\n'};

/// Room for the largest file, wiped when done.
class Buffer {
 public:
  ~Buffer() { wipe(bytes_); }
  [[nodiscard]] std::span<std::byte> all() noexcept { return bytes_; }

 private:
  // One byte more than allowed, so that a longer file shows.
  std::array<std::byte, SecretFile::kMaxSecrets*(SecretFile::kMaxSecretBytes + 1) + 1> bytes_{};
};

Error problem(const std::string& path, std::string what) {
  return {ErrorCode::invalid_argument, fmt::format("secret file {}: {}", path, what)};
}

Error system_problem(const std::string& path) {
  return problem(path, std::generic_category().message(errno));
}

bool same(const struct stat& a, const struct stat& b) noexcept {
  const auto equal = [](const timespec& x, const timespec& y) {
    return x.tv_sec == y.tv_sec && x.tv_nsec == y.tv_nsec;
  };
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size &&
         a.st_mode == b.st_mode && equal(a.st_mtim, b.st_mtim) && equal(a.st_ctim, b.st_ctim);
}

Result<std::shared_ptr<Secrets>> parse(const std::string& path, std::span<const std::byte> left) {
  auto secrets = std::make_shared<Secrets>();
  while (!left.empty()) {
    const auto end = std::ranges::find(left, kNewline);
    const auto line = left.first(static_cast<std::size_t>(end - left.begin()));
    left = left.subspan(line.size() + (end == left.end() ? 0 : 1));
    const std::size_t number = secrets->size() + 1;
    if (number > SecretFile::kMaxSecrets)
      return problem(path, fmt::format("more than {} lines", SecretFile::kMaxSecrets));
    if (line.size() < SecretFile::kMinSecretBytes || line.size() > SecretFile::kMaxSecretBytes) {
      return problem(path, fmt::format("line {} has {} bytes, not {} to {}", number, line.size(),
                                       SecretFile::kMinSecretBytes, SecretFile::kMaxSecretBytes));
    }
    KVSHARD_TRY(auto key, HmacKey::create(line));
    secrets->push_back(std::move(key));
  }
  if (secrets->empty()) return problem(path, "it is empty");
  return secrets;
}

// `state` is the file's before it was read, so that a change meanwhile shows the next time.
Result<std::shared_ptr<Secrets>> read(const std::string& path, struct stat& state) {
  // Without O_NONBLOCK a pipe would hold us until somebody writes to it.
  const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (!fd || ::fstat(fd.get(), &state) != 0) return system_problem(path);
  if (!S_ISREG(state.st_mode)) return problem(path, "it is no regular file");
  if ((state.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return problem(
        path, fmt::format("its mode {:04o} lets others at it, or the group write; make it 0600",
                          state.st_mode & 07777U));
  }
  Buffer buffer;
  std::size_t size = 0;
  while (size < buffer.all().size()) {
    const auto got = ::read(fd.get(), buffer.all().data() + size, buffer.all().size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_problem(path);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  if (size == buffer.all().size())
    return problem(path, fmt::format("more than {} bytes", size - 1));
  return parse(path, buffer.all().first(size));
}

}  // namespace

Result<SecretFile> SecretFile::open(std::string path) {
  struct stat state {};
  KVSHARD_TRY(auto secrets, read(path, state));
  return SecretFile{std::move(path), std::move(secrets), state};
}

std::shared_ptr<Secrets> SecretFile::current() {
  struct stat now {};
  (void)::stat(path_.c_str(), &now);  // a file that is not there differs too
  if (same(now, state_)) return secrets_;
  state_ = now;
  if (auto secrets = read(path_, state_)) {
    secrets_ = std::move(*secrets);
    log::info("secret file {}: read again, {} secrets", path_, secrets_->size());
  } else {
    log::warning("secret file cannot be used, the last secrets stay: {}", secrets.error().message);
  }
  return secrets_;
}

}  // namespace kvshard
