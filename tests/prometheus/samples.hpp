#pragma once

#include <map>
#include <string>

#include "kvshard/metrics.hpp"
#include "prometheus/families.hpp"

namespace kvshard::test {

/// Every field has a value of its own, but for histograms that are all of one rank or source.
PrefillMetrics prefill_metrics();
DecodeMetrics decode_metrics();

/// A sample's name and labels, as in the text format, and its value.
using Samples = std::map<std::string, double>;
/// Fails the test for a sample that is there twice.
Samples parse(const std::string& text);
Samples samples_of(Families families);

}  // namespace kvshard::test
