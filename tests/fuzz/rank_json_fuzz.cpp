#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "registry/rank_json.hpp"

// libFuzzer's entry for the registry's bodies. A rank that is accepted must survive being written and read.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvshard;
  const std::string_view body{reinterpret_cast<const char*>(data), size};
  if (const auto rank = decode_rank(body)) {
    const auto again = decode_rank(encode_rank(*rank));
    if (!again || encode_rank(*again) != encode_rank(*rank)) std::abort();
    (void)check_same_group(*rank, *again);
  }
  (void)decode_ranks(body, "g");
  (void)decode_time_to_live(body);
  (void)decode_error(body);
  return 0;
}
