#include "control/hmac.hpp"

#include <fmt/format.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <array>

namespace kvshard {
namespace {

Error openssl_error(const char* call) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  ERR_clear_error();
  return {ErrorCode::internal, fmt::format("{}: {}", call, text.data())};
}

const unsigned char* data(std::span<const std::byte> bytes) noexcept {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

}  // namespace

void HmacKey::Free::operator()(evp_mac_ctx_st* context) const noexcept {
  EVP_MAC_CTX_free(context);  // wipes the key
}

Result<HmacKey> HmacKey::create(std::span<const std::byte> key) {
  static EVP_MAC* const hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);  // found once, never freed
  if (hmac == nullptr) return openssl_error("EVP_MAC_fetch");
  HmacKey made{EVP_MAC_CTX_new(hmac)};
  char digest[] = "SHA256";
  const std::array parameters{OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
                              OSSL_PARAM_construct_end()};
  if (made.context_ == nullptr ||
      EVP_MAC_init(made.context_.get(), data(key), key.size(), parameters.data()) != 1)
    return openssl_error("EVP_MAC_init");
  return made;
}

Result<wire::Mac> HmacKey::compute(std::initializer_list<std::span<const std::byte>> parts) {
  EVP_MAC_CTX* const context = context_.get();
  bool done = EVP_MAC_init(context, nullptr, 0, nullptr) == 1;  // the same key again
  for (const auto part : parts)
    done = done && EVP_MAC_update(context, data(part), part.size()) == 1;
  wire::Mac mac;
  std::size_t size = 0;
  done = done && EVP_MAC_final(context, reinterpret_cast<unsigned char*>(mac.data()), &size,
                               mac.size()) == 1;
  if (!done || size != mac.size()) return openssl_error("HMAC-SHA256");
  return mac;
}

bool equal_secrets(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void wipe(std::span<std::byte> bytes) noexcept {
  OPENSSL_cleanse(bytes.data(), bytes.size());
}

Result<wire::Nonce> random_nonce() {
  wire::Nonce nonce;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) !=
      1)
    return openssl_error("RAND_bytes");
  return nonce;
}

}  // namespace kvshard
