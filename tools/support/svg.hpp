#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <string_view>

namespace kvshard::tools {

inline std::string svg_escape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '<') {
      escaped += "&lt;";
    } else if (c == '&') {
      escaped += "&amp;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

/// A line of text; `anchor` is start, middle or end, `more` further attributes, each behind a space.
inline std::string svg_text(double x, double y, const char* anchor, std::string_view text,
                            std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                     anchor, more, svg_escape(text));
}

/// A round step that cuts [0, top] into four to eight.
inline double svg_step(double top) {
  const double power = std::pow(10.0, std::floor(std::log10(top / 4)));
  for (const double factor : {5.0, 2.0})
    if (top / (power * factor) >= 4) return power * factor;
  return power;
}

}  // namespace kvshard::tools
