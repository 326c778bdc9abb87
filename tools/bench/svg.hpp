#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace kvshard::bench {

/// A line chart of a few series, from zero up.
struct Chart {
  struct Series {
    std::string name;
    std::vector<std::pair<double, double>> points;  ///< by ascending x
  };
  std::string title, x_label, y_label;
  bool log_x{false};
  std::vector<double> x_ticks;
  std::function<std::string(double)> x_text;
  std::vector<Series> series;
};

/// The chart as an SVG picture. Requires a point with y above 0, and with log_x every x above 0.
std::string to_svg(const Chart& chart);

}  // namespace kvshard::bench
