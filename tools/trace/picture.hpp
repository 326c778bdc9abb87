#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "trace/trace.hpp"

namespace kvshard::trace {

/// What part of a room's time to draw, from the room's first span on.
struct Window {
  std::int64_t from_ns{0};
  std::int64_t to_ns{std::numeric_limits<std::int64_t>::max()};
};

/// What every rank and slot did for `room` over time, as an SVG picture; what slots did for other rooms
/// meanwhile is grey. Bars say more under the pointer.
/// Errors: invalid_argument when there is nothing of the room in the window.
Result<std::string> pipeline_svg(const Trace& trace, std::uint64_t room, Window window = {});

}  // namespace kvshard::trace
