#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "doctor/facts.hpp"

namespace kvshard::doctor {

enum class Severity : std::uint8_t { ok, note, warning, problem };
std::string_view to_string(Severity severity) noexcept;

/// One line of the report. docs/doctor.md lists them all.
struct Finding {
  std::string check{};
  Severity severity{Severity::ok};
  std::string found{};
  std::string advice{};  ///< what to set; empty when all is well
};

// All pure: facts in, findings out.

/// About one host.
std::vector<Finding> judge(const Facts& facts);
/// About what two hosts must have in common.
std::vector<Finding> judge_pair(const Facts& ours, const Facts& peer);
/// About one pull from `peer`, which is `ours` when both processes are on this host.
Finding judge(const Measure& measure, const Facts& ours, const Facts& peer);

/// The worst of all.
Severity worst(const std::vector<Finding>& findings) noexcept;

}  // namespace kvshard::doctor
