#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "trace/picture.hpp"
#include "trace/summary.hpp"
#include "trace/trace.hpp"

// libFuzzer's entry for kvshard-trace: whatever is accepted can be summed up and drawn, and is accepted again as
// the tool writes it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvshard::trace;
  const auto trace = parse_trace({reinterpret_cast<const char*>(data), size});
  if (!trace) return 0;
  const auto again = parse_trace(write_trace(*trace));
  if (!again || again->spans.size() != trace->spans.size()) std::abort();
  const Summary summary = summarize(*trace);
  (void)to_text(summary);
  (void)to_json(summary).dump();
  if (!trace->spans.empty()) (void)pipeline_svg(*trace, trace->spans[0].room);
  return 0;
}
