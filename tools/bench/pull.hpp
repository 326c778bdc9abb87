#pragma once

#include <string>

#include "bench/config.hpp"
#include "bench/report.hpp"
#include "kvshard/result.hpp"

namespace kvshard::bench {

/// Measures whole pulls between rank processes: the object that the style of benches asks for, with
/// what an operator needs to know beside it ("paths", "sources", "limit").
///
/// Bytes are verified first: every one of every request, and canaries on all other pages. Then ours and
/// the baselines take turns.
/// `trace`, if any, is the file that a trace of all ranks goes to.
/// Errors: what a rank process said; data_loss for wrong bytes.
Result<Json> measure_pull(const PullConfig& config, const std::string& trace = "");

/// The result in a few lines for people.
std::string pull_verdict(const Json& result);

}  // namespace kvshard::bench
