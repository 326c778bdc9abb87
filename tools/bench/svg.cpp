#include "bench/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "support/svg.hpp"

namespace kvshard::bench {
namespace {

using tools::svg_step;
using tools::svg_text;

constexpr double kWidth = 750, kHeight = 400;
constexpr double kLeft = 70, kRight = 200, kTop = 45, kBottom = 55;
// Told apart also by people who do not see all colours.
constexpr std::array kColours{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

}  // namespace

std::string to_svg(const Chart& chart) {
  double first = INFINITY, last = -INFINITY, top = 0;
  const auto scale = [&](double x) { return chart.log_x ? std::log2(x) : x; };
  for (const Chart::Series& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      first = std::min(first, scale(x));
      last = std::max(last, scale(x));
      top = std::max(top, y);
    }
  }
  const double span = last > first ? last - first : 1;
  const double step = svg_step(top);
  top = std::ceil(top / step) * step;
  const auto at_x = [&](double x) {
    return kLeft + (scale(x) - first) / span * (kWidth - kLeft - kRight);
  };
  const auto at_y = [&](double y) {
    return kHeight - kBottom - y / top * (kHeight - kTop - kBottom);
  };

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  svg += svg_text(kLeft, 25, "start", chart.title, " font-size=\"15\"");
  for (int i = 0; i <= static_cast<int>(std::lround(top / step)); ++i) {
    const double y = i * step;
    svg += fmt::format("<path d=\"M{:.1f} {:.1f}H{:.1f}\" stroke=\"#ddd\"/>\n", kLeft, at_y(y),
                       kWidth - kRight);
    svg += svg_text(kLeft - 8, at_y(y) + 4, "end", fmt::format("{:g}", y));
  }
  for (const double x : chart.x_ticks)
    svg += svg_text(at_x(x), kHeight - kBottom + 18, "middle", chart.x_text(x));
  svg += svg_text((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", chart.x_label);
  svg += svg_text(0, 0, "middle", chart.y_label,
                  fmt::format(" transform=\"translate(18 {:.1f}) rotate(-90)\"",
                              (kTop + kHeight - kBottom) / 2));
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const Chart::Series& series = chart.series[i];
    const char* const colour = kColours[i % kColours.size()];
    std::string path;
    for (const auto& [x, y] : series.points)
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", at_x(x), at_y(y));
    svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path,
                       colour);
    if (series.points.size() <= 20)
      for (const auto& [x, y] : series.points)
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", at_x(x),
                           at_y(y), colour);
    const double y = kTop + 8 + 18 * static_cast<double>(i);
    svg += fmt::format("<path d=\"M{:.1f} {:.1f}h18\" stroke=\"{}\" stroke-width=\"3\"/>\n",
                       kWidth - kRight + 15, y - 4, colour);
    svg += svg_text(kWidth - kRight + 40, y, "start", series.name);
  }
  return svg + "</svg>\n";
}

}  // namespace kvshard::bench
