#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>

#include "kvshard/result.hpp"
#include "wire/messages.hpp"

struct evp_mac_ctx_st;

// The little of OpenSSL that authentication needs; no other file includes it.
namespace kvshard {

/// HMAC-SHA256 under one key, which is wiped with the object.
///
/// Threads: one at a time.
class HmacKey {
 public:
  /// Errors: internal, when OpenSSL has no HMAC-SHA256 or no memory.
  static Result<HmacKey> create(std::span<const std::byte> key);

  /// Over the parts as if they were one. Allocates nothing.
  Result<wire::Mac> compute(std::initializer_list<std::span<const std::byte>> parts);

 private:
  struct Free {
    void operator()(evp_mac_ctx_st* context) const noexcept;
  };
  explicit HmacKey(evp_mac_ctx_st* context) noexcept : context_{context} {}

  std::unique_ptr<evp_mac_ctx_st, Free> context_;
};

/// In a time that does not depend on the bytes. Requires equal sizes.
[[nodiscard]] bool equal_secrets(std::span<const std::byte> a,
                                 std::span<const std::byte> b) noexcept;
/// Overwrites, and is not optimised away.
void wipe(std::span<std::byte> bytes) noexcept;
/// Errors: internal, when the system gives no entropy.
Result<wire::Nonce> random_nonce();

}  // namespace kvshard
