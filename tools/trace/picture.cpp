#include "trace/picture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "support/svg.hpp"
#include "support/text.hpp"

namespace kvshard::trace {
namespace {

using tools::human_bytes;
using tools::human_time;
using tools::svg_escape;
using tools::svg_text;

constexpr double kWidth = 1200, kLeft = 150, kRight = 25, kTop = 78;
constexpr double kRow = 18, kBar = 14, kBlock = 24;
constexpr double kLetter = 5.8;   // width of one, about
constexpr double kNothing = 0.4;  // a bar that is narrower is not seen

// Told apart also by people who do not see all colours: what moves bytes is strong, what waits is pale.
struct Look {
  Stage stage;
  const char* fill;
  const char* text;
};
constexpr std::array kLooks{
    Look{Stage::pull, "#e4e7ec", "#555"},   Look{Stage::lease, "#e4e7ec", "#555"},
    Look{Stage::queue, "#cc79a7", "#fff"},  Look{Stage::connect, "#7f3c8d", "#fff"},
    Look{Stage::room, "#c9b6a3", "#222"},   Look{Stage::wait, "#c9ced6", "#222"},
    Look{Stage::gather, "#e69f00", "#222"}, Look{Stage::exposed, "#f7e3b5", "#222"},
    Look{Stage::wire, "#0072b2", "#fff"},   Look{Stage::scatter, "#009e73", "#fff"},
    Look{Stage::skew, "#f0b4a0", "#222"},   Look{Stage::commit, "#d55e00", "#fff"},
};

// pull and lease lie under the stages that they contain.
bool contains_others(Stage stage) {
  return stage == Stage::pull || stage == Stage::lease;
}

// Where a span stands: its rank, what kind of row, which of them.
using Key = std::tuple<RankOrder, int, std::uint64_t, std::uint64_t>;

struct Row {
  std::string label;
  std::vector<const Span*> spans;
};

class Picture {
 public:
  Picture(const Trace& trace, std::uint64_t room, std::int64_t begin_ns, std::int64_t end_ns)
      : trace_{trace}, room_{room}, begin_ns_{begin_ns}, end_ns_{end_ns} {}

  std::string draw() {
    std::vector<bool> of_room(trace_.ranks.size());
    for (const Span& span : trace_.spans)
      if (span.room == room_ && seen(span)) of_room[span.rank] = true;
    for (const Span& span : trace_.spans)
      if (seen(span) && of_room[span.rank] && (span.room == room_ || of_a_piece(span.stage)))
        add(span);
    for (auto& [key, row] : rows_) {
      const RankOrder& rank = std::get<0>(key);
      if (rank.name != block_) open_block(rank.name);
      draw_row(row);
    }
    return head() + body_ + "</svg>\n";
  }

 private:
  [[nodiscard]] bool seen(const Span& span) const {
    return span.begin_ns <= end_ns_ && span.end_ns >= begin_ns_;
  }
  [[nodiscard]] double at_x(std::int64_t ns) const {
    const auto share = static_cast<double>(std::clamp(ns, begin_ns_, end_ns_) - begin_ns_) /
                       static_cast<double>(end_ns_ - begin_ns_);
    return kLeft + share * (kWidth - kLeft - kRight);
  }

  void add(const Span& span) {
    const RankOrder rank = order_of(trace_, span);
    if (of_a_piece(span.stage)) {
      const Lane& lane = trace_.lanes[span.lane];
      const std::string& name = trace_.ranks[span.rank].name;
      Row& row = rows_[{rank, 2, lane.tid, 0}];
      row.label = lane.name.starts_with(name + " ") ? lane.name.substr(name.size() + 1) : lane.name;
      row.spans.push_back(&span);
    } else if (span.stage == Stage::wait) {
      Row& row = rows_[{rank, 1, span.source, span.pull}];
      row.label = fmt::format("from prefill {}", span.source);
      row.spans.push_back(&span);
    } else {
      Row& row = rows_[{rank, 0, span.pull, 0}];
      row.label = fmt::format("{} {}", rank.decode ? "pull" : "lease of pull", span.pull);
      row.spans.push_back(&span);
    }
    if (span.room == room_ && span.stage == Stage::wire) {
      bytes_ += span.bytes;
      sources_.insert(span.source);
    }
  }

  void open_block(const std::string& rank) {
    block_ = rank;
    y_ += kBlock;
    body_ += svg_text(12, y_ - 6, "start", rank, " font-weight=\"bold\"");
    body_ +=
        fmt::format("<path d=\"M12 {0:.1f}H{1}\" stroke=\"#999\"/>\n", y_ - 1.5, kWidth - kRight);
    y_ += 3;
  }

  void draw_row(Row& row) {
    std::ranges::sort(row.spans, [](const Span* a, const Span* b) {
      return std::tuple{!contains_others(a->stage), a->begin_ns, a->stage} <
             std::tuple{!contains_others(b->stage), b->begin_ns, b->stage};
    });
    body_ += svg_text(kLeft - 8, y_ + kBar - 3, "end", row.label, " fill=\"#444\"");
    const Span* before = nullptr;
    for (const Span* span : row.spans) {
      // Of bars that cannot be told apart, one stands for all.
      if (before != nullptr && before->stage == span->stage &&
          at_x(span->end_ns) - at_x(before->end_ns) < kNothing)
        continue;
      draw_bar(*span);
      before = span;
    }
    y_ += kRow;
  }

  void draw_bar(const Span& span) {
    const double x = at_x(span.begin_ns);
    const double width = std::max(at_x(span.end_ns) - x, kNothing);
    const bool ours = span.room == room_;
    std::string about = fmt::format("{}: {}", to_string(span.stage), human_time(span.ns()));
    if (of_a_piece(span.stage))
      about += fmt::format(", piece {} from prefill {}, {}, waited {}", span.piece, span.source,
                           human_bytes(span.bytes), human_time(span.waited_ns));
    if (!ours) about += fmt::format(", room {}", span.room);
    body_ += fmt::format(
        "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"{:.0f}\"><title>{}"
        "</title></rect>\n",
        ours ? to_string(span.stage) : "other", x, y_, width, kBar, svg_escape(about));
    if (!ours || contains_others(span.stage)) return;
    const std::string label = !of_a_piece(span.stage) ? std::string{to_string(span.stage)}
                              : on_prefill(span.stage)
                                  ? std::to_string(span.piece)
                                  : fmt::format("{}:{}", span.source, span.piece);
    if (width < kLetter * static_cast<double>(label.size()) + 4) return;
    body_ += svg_text(x + width / 2, y_ + kBar - 3.5, "middle", label,
                      fmt::format(" class=\"on-{}\"", to_string(span.stage)));
  }

  // All that needs the height, and so comes last to be known: frame, axis, legend.
  std::string head() {
    const double bottom = y_ + 4;
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1:.0f}\" width=\"{0}\" "
        "height=\"{1:.0f}\" font-family=\"sans-serif\" "
        "font-size=\"11\">\n<style>.other{{fill:#eee}}",
        kWidth, bottom + 26);
    for (const Look& look : kLooks)
      svg += fmt::format(".{0}{{fill:{1}}}.on-{0}{{fill:{2};font-size:10px}}",
                         to_string(look.stage), look.fill, look.text);
    svg += "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    svg += svg_text(12, 24, "start",
                    fmt::format("Room {}: {} from {} prefill rank{} in {}", room_,
                                human_bytes(bytes_), sources_.size(),
                                sources_.size() == 1 ? "" : "s", human_time(end_ns_ - begin_ns_)),
                    " font-size=\"16\"");
    double x = 12;
    const auto legend = [&](std::string_view name, std::string_view text) {
      svg += fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"40\" width=\"14\" height=\"14\"/>\n",
                         name, x);
      svg += svg_text(x + 19, 51, "start", text);
      x += 19 + (kLetter + 0.4) * static_cast<double>(text.size()) + 18;
    };
    for (const Look& look : kLooks)
      if (look.stage != Stage::lease)
        legend(to_string(look.stage),
               look.stage == Stage::pull ? "pull, lease" : to_string(look.stage));
    legend("other", "for other rooms");
    svg += svg_text(x, 51, "start", "number: piece, or prefill rank : piece", " fill=\"#444\"");

    const auto span_ns = static_cast<double>(end_ns_ - begin_ns_);
    const double step = std::max(tools::svg_step(span_ns), 1.0);
    const bool millis = step >= 1e5;
    for (int i = 0; i * step <= span_ns; ++i) {
      const double ns = i * step;
      const double tick = kLeft + ns / span_ns * (kWidth - kLeft - kRight);
      svg += fmt::format("<path d=\"M{:.1f} {:.1f}V{:.1f}\" stroke=\"#e3e3e3\"/>\n", tick, kTop - 8,
                         bottom);
      svg += svg_text(tick, bottom + 16, "middle",
                      fmt::format("{:g} {}", ns / (millis ? 1e6 : 1e3), millis ? "ms" : "us"));
    }
    return svg;
  }

  const Trace& trace_;
  const std::uint64_t room_;
  const std::int64_t begin_ns_, end_ns_;
  std::map<Key, Row> rows_;
  std::uint64_t bytes_{0};
  std::set<std::uint32_t> sources_;
  std::string block_, body_;
  double y_{kTop - kBlock + 4};
};

}  // namespace

Result<std::string> pipeline_svg(const Trace& trace, std::uint64_t room, Window window) {
  std::int64_t begin = INT64_MAX, end = INT64_MIN;
  for (const Span& span : trace.spans) {
    if (span.room != room) continue;
    begin = std::min(begin, span.begin_ns);
    end = std::max(end, span.end_ns);
  }
  if (begin > end)
    return Error{ErrorCode::invalid_argument, fmt::format("there is nothing of room {}", room)};
  const std::int64_t from = std::min(window.from_ns, end - begin);
  const std::int64_t to = std::min(window.to_ns, end - begin);
  if (from >= to)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("room {} took {}, and has no part from {} to {}", room,
                             human_time(end - begin), human_time(from), human_time(to))};
  return Picture{trace, room, begin + from, begin + to}.draw();
}

}  // namespace kvshard::trace
