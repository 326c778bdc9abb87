#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "wire/samples.hpp"

// libFuzzer's entry for the wire decoders. The input is a frame, as it comes off a connection. A message
// that is accepted must encode to the very bytes that it came from.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvshard::wire;
  const auto frame = std::as_bytes(std::span{data, size});
  if (size < kFrameHeaderBytes) return 0;
  const auto header = decode_header(frame.first<kFrameHeaderBytes>());
  if (!header) return 0;
  const auto payload = payload_of(frame);
  if (header->type == MessageType::hello) (void)decode_hello_prefix(payload);
  with_message_of(header->type, [&]<class M>(const M&) {
    const auto message = decode<M>(payload);
    if (message && !std::ranges::equal(payload_of(frame_of(*message)), payload)) std::abort();
  });
  return 0;
}
