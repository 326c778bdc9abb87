// kvshard-trace: what the traces of ranks of one host say together, as a table, a picture, or one trace.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "base/try.hpp"
#include "support/text.hpp"
#include "trace/picture.hpp"
#include "trace/summary.hpp"
#include "trace/trace.hpp"

namespace kvshard::trace {
namespace {

struct Options {
  std::vector<std::string> files;
  std::optional<std::uint64_t> room;
  std::string svg, merged;
  std::optional<double> from_ms, to_ms;
  bool json{false};
};

Status run(const Options& options) {
  KVSHARD_TRY(const Trace trace, read_traces(options.files));
  const Summary summary = summarize(trace, options.room);
  if (options.room && summary.rooms == 0)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("there is nothing of room {}", *options.room)};
  if (!options.merged.empty()) KVSHARD_TRY(tools::write_text(options.merged, write_trace(trace)));
  if (!options.svg.empty()) {
    if (!options.room && summary.slowest.empty())
      return Error{ErrorCode::invalid_argument, "no pull here to draw: name a room"};
    Window window;
    if (options.from_ms) window.from_ns = std::llround(*options.from_ms * 1e6);
    if (options.to_ms) window.to_ns = std::llround(*options.to_ms * 1e6);
    KVSHARD_TRY(
        const std::string picture,
        pipeline_svg(trace, options.room ? *options.room : summary.slowest[0].room, window));
    KVSHARD_TRY(tools::write_text(options.svg, picture));
  }
  return tools::write_text("-", options.json ? to_json(summary).dump() + "\n" : to_text(summary));
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"What the traces of ranks of one host say together: docs/tracing.md."};
  app.add_option("file", options.files, "traces that processes of one host wrote")->required();
  app.add_option("--room", options.room, "only what was done for this room");
  app.add_option(
      "--svg", options.svg,
      "where a picture of the pipeline goes; of the slowest pull's room, or that of --room");
  constexpr double kDay = 86'400e3;
  app.add_option("--from", options.from_ms,
                 "ms after the room's first span: where the picture begins")
      ->check(CLI::Range(0.0, kDay));
  app.add_option("--to", options.to_ms, "and ends")->check(CLI::Range(0.0, kDay));
  app.add_option("--merge", options.merged, "where one trace of all goes, for a trace viewer");
  app.add_flag("--json", options.json, "the summary for programs");
  CLI11_PARSE(app, argc, argv);
  const Status status = run(options);
  if (status) return 0;
  fmt::print(stderr, "kvshard-trace: {}\n", status.error().message);
  return 1;
}

}  // namespace
}  // namespace kvshard::trace

int main(int argc, char** argv) {
  return kvshard::trace::main(argc, argv);
}
