#include "control/handshake.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/try.hpp"

namespace kvshard {
namespace {

using wire::MessageType;

// What an HMAC under a secret is for. All have one length, and what follows them too, so that none can
// be taken for another.
constexpr std::string_view kDecodeProof = "kvshard1 proof D";
constexpr std::string_view kPrefillProof = "kvshard1 proof P";
constexpr std::string_view kDecodeKey = "kvshard1 key D>P";
constexpr std::string_view kPrefillKey = "kvshard1 key P>D";

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span{text});
}

template <std::size_t Size>
std::array<std::byte, Size> little_endian(std::uint64_t value) {
  std::array<std::byte, Size> bytes;
  for (std::size_t i = 0; i < Size; ++i) bytes[i] = static_cast<std::byte>(value >> (8 * i));
  return bytes;
}

Error refusal(std::string what) {
  return {ErrorCode::failed_precondition, std::move(what)};
}

std::span<const std::byte> payload_of(std::span<const std::byte> frame) {
  return frame.subspan(wire::kFrameHeaderBytes);
}

}  // namespace

Result<wire::Mac> FrameMac::compute(std::span<const std::byte> frame) {
  const auto number = little_endian<8>(number_++);
  return key_.compute({number, frame});
}

Status FrameMac::seal(std::vector<std::byte>& out, std::size_t frame) {
  const auto size = little_endian<4>(out.size() - frame - wire::kFrameHeaderBytes + kBytes);
  std::ranges::copy(size, out.begin() + static_cast<std::ptrdiff_t>(frame));
  KVSHARD_TRY(const auto mac, compute(std::span{out}.subspan(frame)));
  out.insert(out.end(), mac.begin(), mac.begin() + kBytes);
  return {};
}

Result<std::span<const std::byte>> FrameMac::open(std::span<const std::byte> frame) {
  const std::uint64_t number = number_;
  if (frame.size() < wire::kFrameHeaderBytes + kBytes)
    return refusal(fmt::format("frame {} has {} bytes, too few for a MAC", number, frame.size()));
  const auto covered = frame.first(frame.size() - kBytes);
  KVSHARD_TRY(const auto mac, compute(covered));
  if (!equal_secrets(std::span{mac}.first<kBytes>(), frame.last<kBytes>())) {
    return refusal(fmt::format(
        "the MAC of frame {} is wrong: it was changed, sent twice, or is out of order", number));
  }
  return payload_of(covered);
}

Status Handshake::start(std::vector<std::byte>& out) {
  KVSHARD_TRY(const auto nonce, random_nonce());
  wire::encode(wire::Authenticate{.nonce = nonce}, transcript_);
  out.insert(out.end(), transcript_.begin(), transcript_.end());
  return {};
}

Result<bool> Handshake::take(MessageType type, std::span<const std::byte> frame,
                             std::vector<std::byte>& out) {
  if (type == MessageType::bye) {
    KVSHARD_TRY(wire::Bye bye, wire::decode<wire::Bye>(payload_of(frame)));
    return std::move(bye.error);
  }
  if (type == MessageType::hello)
    return refusal("the decode rank uses no secret, and this prefill rank requires one");
  if (type != expected_) {
    return refusal(fmt::format("message {} where {} is expected", wire::to_string(type),
                               wire::to_string(expected_)));
  }
  switch (type) {
    case MessageType::authenticate:
      return challenge(frame, out);
    case MessageType::challenge:
      return prove(frame, out);
    default:
      return side_ == Side::prefill ? check_decode(payload_of(frame), out)
                                    : check_prefill(payload_of(frame));
  }
}

Result<bool> Handshake::challenge(std::span<const std::byte> frame, std::vector<std::byte>& out) {
  KVSHARD_TRY(wire::decode<wire::Authenticate>(payload_of(frame)));
  KVSHARD_TRY(const auto nonce, random_nonce());
  const std::size_t start = out.size();
  wire::encode(wire::Challenge{.nonce = nonce}, out);
  transcript_.assign(frame.begin(), frame.end());
  transcript_.insert(transcript_.end(), out.begin() + static_cast<std::ptrdiff_t>(start),
                     out.end());
  expected_ = MessageType::proof;
  return false;
}

Result<bool> Handshake::prove(std::span<const std::byte> frame, std::vector<std::byte>& out) {
  KVSHARD_TRY(wire::decode<wire::Challenge>(payload_of(frame)));
  transcript_.insert(transcript_.end(), frame.begin(), frame.end());
  KVSHARD_TRY(const auto mac, secrets_->front().compute({bytes_of(kDecodeProof), transcript_}));
  wire::encode(wire::Proof{mac}, out);
  expected_ = MessageType::proof;
  return false;
}

// Each of our secrets is tried, so that no secret needs a name; the answer is under the one that fits.
Result<bool> Handshake::check_decode(std::span<const std::byte> payload,
                                     std::vector<std::byte>& out) {
  KVSHARD_TRY(const wire::Proof proof, wire::decode<wire::Proof>(payload));
  HmacKey* shared = nullptr;
  for (HmacKey& secret : *secrets_) {
    KVSHARD_TRY(const auto mac, secret.compute({bytes_of(kDecodeProof), transcript_}));
    if (equal_secrets(mac, proof.mac)) shared = &secret;
  }
  if (shared == nullptr) return refusal("the decode rank's secret is not the prefill rank's");
  KVSHARD_TRY(const auto mac, shared->compute({bytes_of(kPrefillProof), transcript_}));
  wire::encode(wire::Proof{mac}, out);
  KVSHARD_TRY(make_keys(*shared));
  return true;
}

Result<bool> Handshake::check_prefill(std::span<const std::byte> payload) {
  KVSHARD_TRY(const wire::Proof proof, wire::decode<wire::Proof>(payload));
  HmacKey& secret = secrets_->front();
  KVSHARD_TRY(const auto mac, secret.compute({bytes_of(kPrefillProof), transcript_}));
  if (!equal_secrets(mac, proof.mac))
    return refusal("the prefill rank's secret is not the decode rank's");
  KVSHARD_TRY(make_keys(secret));
  return true;
}

Status Handshake::make_keys(HmacKey& secret) {
  const auto make = [&](std::string_view label) -> Result<FrameMac> {
    KVSHARD_TRY(auto bytes, secret.compute({bytes_of(label), transcript_}));
    auto key = HmacKey::create(bytes);
    wipe(bytes);
    if (!key) return std::move(key).error();
    return FrameMac{std::move(*key)};
  };
  const bool decode = side_ == Side::decode;
  KVSHARD_TRY(sending_, make(decode ? kDecodeKey : kPrefillKey));
  KVSHARD_TRY(receiving_, make(decode ? kPrefillKey : kDecodeKey));
  return {};
}

}  // namespace kvshard
