#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "registry/http.hpp"

namespace {

using kvshard::http::MessageReader;

// Feeds `bytes` in steps of `step`; what a reader makes of a message must not depend on how it was cut.
struct Read {
  enum class End { open, whole, refused } end{End::open};
  std::string start_line, body;
  friend bool operator==(const Read&, const Read&) = default;
};

Read read(MessageReader::Kind kind, std::string_view bytes, std::size_t step) {
  MessageReader reader{kind};
  Read made;
  while (!bytes.empty() && made.end == Read::End::open) {
    const auto fed = reader.feed(bytes.substr(0, step));
    bytes.remove_prefix(std::min(step, bytes.size()));
    if (!fed) return {.end = Read::End::refused, .start_line = {}, .body = {}};
    if (*fed) made.end = Read::End::whole;
  }
  if (made.end == Read::End::open && reader.whole_at_end()) made.end = Read::End::whole;
  if (made.end == Read::End::whole) {
    made.start_line = reader.start_line();
    made.body = reader.take_body();
  }
  return made;
}

}  // namespace

// libFuzzer's entry for the registry's HTTP: requests and responses, whole and in small pieces. The first
// byte says how small.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes{reinterpret_cast<const char*>(data) + 1, size - 1};
  (void)kvshard::http::parse_address(bytes);
  for (const auto kind : {MessageReader::Kind::request, MessageReader::Kind::response}) {
    if (!(read(kind, bytes, bytes.size()) == read(kind, bytes, data[0] % 16 + 1U))) std::abort();
  }
  return 0;
}
