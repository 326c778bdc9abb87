#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "control/handshake.hpp"

namespace {

using namespace kvshard;
using Bytes = std::vector<std::byte>;

std::shared_ptr<Secrets> secrets() {
  auto made = std::make_shared<Secrets>();
  made->push_back(std::move(HmacKey::create(Bytes(16, std::byte{7}))).value());
  return made;
}

// One end of the handshake, and what the network last brought it.
struct End {
  Handshake handshake;
  bool honest{true};  // it took nothing but what the other end sent
  bool done{false}, refused{false};

  // Takes a frame, and leaves the answer in `out`.
  void take(const Bytes& frame, bool as_sent, Bytes& out) {
    if (done || refused || frame.size() < wire::kFrameHeaderBytes) return;
    const auto header = wire::decode_header(std::span{frame}.first<wire::kFrameHeaderBytes>());
    if (!header || header->payload_bytes != frame.size() - wire::kFrameHeaderBytes) {
      refused = true;
      return;
    }
    Bytes answer;
    const auto took = handshake.take(header->type, frame, answer);
    refused = !took.ok();
    if (refused) return;
    honest = honest && as_sent;
    done = *took;
    if (!answer.empty()) out = std::move(answer);
  }
};

}  // namespace

// libFuzzer's entry for the handshake and sealed frames. The input is a network that changes, repeats, cuts and
// makes up frames. Only ends that heard nothing but each other may come through.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto shared = secrets();
  End decode{.handshake{Handshake::Side::decode, shared}};
  End prefill{.handshake{Handshake::Side::prefill, shared}};
  Bytes to_prefill, to_decode;
  if (!decode.handshake.start(to_prefill)) std::abort();
  const auto number = [&]() -> std::uint8_t {
    if (size == 0) return 0;
    --size;
    return *data++;
  };
  while (size > 0) {
    const std::uint8_t op = number();
    const bool to = op % 2 == 0;
    End& end = to ? prefill : decode;
    Bytes frame = to ? to_prefill : to_decode;
    const Bytes sent = frame;
    switch (op / 2 % 5) {
      case 0:
        break;
      case 1:
        if (!frame.empty()) frame[number() % frame.size()] ^= static_cast<std::byte>(number());
        break;
      case 2:
        frame.resize(std::min<std::size_t>(frame.size(), number()));
        break;
      case 3:
        frame = to ? to_decode : to_prefill;  // its own words
        break;
      default: {
        frame.assign(wire::kFrameHeaderBytes, std::byte{0});
        const std::size_t bytes = std::min<std::size_t>(number(), size);
        frame[0] = static_cast<std::byte>(bytes);
        frame[4] = static_cast<std::byte>(number());
        while (frame.size() < wire::kFrameHeaderBytes + bytes)
          frame.push_back(static_cast<std::byte>(number()));
      }
    }
    end.take(frame, frame == sent, to ? to_decode : to_prefill);
  }
  if ((decode.done && !decode.honest) || (prefill.done && !prefill.honest)) std::abort();
  if (!decode.done || !prefill.done) return 0;
  FrameMac sending = decode.handshake.take_sending();
  FrameMac receiving = prefill.handshake.take_receiving();
  Bytes sealed;
  wire::encode(wire::Ping{1}, sealed);
  if (!sending.seal(sealed, 0) || !receiving.open(sealed) || receiving.open(sealed)) std::abort();
  return 0;
}
