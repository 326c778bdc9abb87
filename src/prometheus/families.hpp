#pragma once

#include <prometheus/metric_family.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvshard/metrics.hpp"

namespace kvshard {

using Labels = std::vector<prometheus::ClientMetric::Label>;

/// Other bytes than printable ASCII become '?': one that is no UTF-8 would spoil a whole scrape, and some label
/// values come from peers.
std::string printable(std::string text);

/// Samples of several ranks, brought together by metric, which is how the text format wants them.
class Families {
 public:
  /// `common` goes on every sample.
  explicit Families(Labels common) : common_{std::move(common)} {}

  void add(const std::string& name, std::string_view help, prometheus::MetricType type,
           const Labels& labels, prometheus::ClientMetric sample);
  /// By name.
  [[nodiscard]] std::vector<prometheus::MetricFamily> take();

 private:
  Labels common_;
  std::map<std::string, prometheus::MetricFamily> families_;
};

/// Adds all that a rank says of itself. docs/metrics.md lists the names.
void append(Families& families, const PrefillMetrics& metrics);
void append(Families& families, const DecodeMetrics& metrics, const std::string& name);

}  // namespace kvshard
