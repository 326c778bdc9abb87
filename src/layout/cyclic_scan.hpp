#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvshard/types.hpp"

namespace kvshard {
class PageLayout;

// The vector half of PageLayout::check_cyclic(): true when owners ascend cyclically and no page is
// padding. Runs the widest version that this processor has.
[[nodiscard]] bool scan_cyclic(std::span<const LogicalPage> pages,
                               const PageLayout& layout) noexcept;

// The versions that this processor can run, narrowest first, so that tests compare all of them.
using CyclicScan = bool (*)(std::span<const LogicalPage>, const PageLayout&) noexcept;
[[nodiscard]] std::vector<CyclicScan> cyclic_scans();

}  // namespace kvshard
