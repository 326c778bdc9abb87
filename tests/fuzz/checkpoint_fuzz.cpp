#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "tiny_llm/checkpoint.hpp"

// libFuzzer's entry for model files of both formats.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span{data, size});
  const auto checkpoint = tiny_llm::parse_checkpoint(bytes);
  // The sizes in the header decide how much is read, so they must be those of the file.
  if (checkpoint && checkpoint->weights.layers.size() != checkpoint->config.layers) std::abort();
  return 0;
}
