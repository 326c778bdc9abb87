#include "kvshard/tracer.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include <fmt/format.h>

#include "base/mutex.hpp"
#include "session/trace_track.hpp"

namespace kvshard {

namespace {

constexpr std::uint64_t kLanesPerTrack = 100'000;

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream{"/proc/sys/kernel/random/boot_id"}, id);
  return id;
}

// The names come from an engine's configuration: what would end a JSON string early is left out.
std::string quoted(std::string_view text) {
  std::string out{'"'};
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\') out += c;
  }
  return out + '"';
}

bool of_a_piece(Stage stage) noexcept {
  return stage == Stage::wire || stage == Stage::scatter || stage == Stage::gather ||
         stage == Stage::exposed;
}

double microseconds(Duration time) {
  return std::chrono::duration<double, std::micro>{time}.count();
}

// One process's events, without the commas between them.
class Events {
 public:
  void add(std::string_view event) {
    if (!text_.empty()) text_ += ",\n";
    text_ += event;
  }
  void name(std::string_view what, std::uint64_t lane, std::string_view name) {
    add(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what,
                    pid_, lane, quoted(name)));
  }
  void span(const Span& span, std::string_view rank, std::uint64_t lane) {
    const std::string args =
        fmt::format(R"("rank":{},"room":"{}","pull":"{}","source":{},"lease":"{}")", quoted(rank),
                    index(span.room), span.pull, span.source, span.lease);
    const double begin = microseconds(span.begin.time_since_epoch());
    if (of_a_piece(span.stage)) {
      add(fmt::format(
          R"({{"ph":"X","cat":"piece","name":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},)"
          R"("args":{{{},"piece":{},"bytes":{},"waited_us":{:.3f}}}}})",
          to_string(span.stage), pid_, lane, begin, microseconds(span.end - span.begin), args,
          span.piece, span.bytes, microseconds(span.waited)));
      return;
    }
    const auto half = [&](char phase, TimePoint when, std::string_view more) {
      add(fmt::format(
          R"({{"ph":"{}","cat":"request","name":"{}","pid":{},"tid":{},"ts":{:.3f},"id2":{{"local":"{:#x}"}}{}}})",
          phase, to_string(span.stage), pid_, lane, microseconds(when.time_since_epoch()),
          requests_, more));
    };
    ++requests_;
    half('b', span.begin, fmt::format(R"(,"args":{{{}}})", args));
    half('e', span.end, "");
  }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  const int pid_{::getpid()};
  std::uint64_t requests_{0};
  std::string text_;
};

}  // namespace

class Tracer::Impl {
 public:
  explicit Impl(TracerOptions options) : options_{std::move(options)} {}

  std::shared_ptr<TraceTrack> track(std::string name) {
    auto made =
        std::make_shared<TraceTrack>(std::move(name), options_.one_in, options_.spans_per_rank);
    const MutexLock lock{mutex_};
    tracks_.push_back(made);
    return made;
  }

  [[nodiscard]] std::string text() const {
    std::vector<std::shared_ptr<TraceTrack>> tracks;
    {
      const MutexLock lock{mutex_};
      tracks = tracks_;
    }
    Events events;
    events.name("process_name", 0, options_.process);
    std::uint64_t overwritten = 0;
    for (std::size_t i = 0; i < tracks.size(); ++i) {
      // Lanes of a track: its requests, then its slots.
      const std::uint64_t requests = (i + 1) * kLanesPerTrack;
      const std::string& rank = tracks[i]->name();
      events.name("thread_name", requests, rank + " requests");
      const TraceTrack::Copy copy = tracks[i]->copy();
      overwritten += copy.overwritten;
      std::vector<bool> named;
      for (const Span& span : copy.spans) {
        if (!of_a_piece(span.stage)) {
          events.span(span, rank, requests);
          continue;
        }
        if (span.slot >= named.size()) named.resize(span.slot + 1);
        const std::uint64_t lane = requests + 1 + span.slot;
        if (!named[span.slot]) {
          const bool landing = span.stage == Stage::wire || span.stage == Stage::scatter;
          events.name("thread_name", lane,
                      fmt::format("{} {} {}", rank, landing ? "landing" : "slot", span.slot));
          named[span.slot] = true;
        }
        events.span(span, rank, lane);
      }
    }
    return fmt::format(R"({{"displayTimeUnit":"ns","otherData":{{"version":1,"boot_id":"{}",)"
                       R"("overwritten":{}}},"traceEvents":[)"
                       "\n{}\n]}}\n",
                       boot_id(), overwritten, events.text());
  }

 private:
  const TracerOptions options_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<TraceTrack>> tracks_ KVSHARD_GUARDED_BY(mutex_);
};

Result<std::shared_ptr<Tracer>> Tracer::create(TracerOptions options) {
  if (options.one_in == 0 || options.spans_per_rank == 0) {
    return Error{ErrorCode::invalid_argument,
                 fmt::format("one_in {} and spans_per_rank {} must not be 0", options.one_in,
                             options.spans_per_rank)};
  }
  return std::shared_ptr<Tracer>{new Tracer{std::make_unique<Impl>(std::move(options))}};
}

Tracer::Tracer(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
Tracer::~Tracer() = default;

Status Tracer::write(const std::string& path) const {
  const std::string text = impl_->text();
  errno = 0;
  std::ofstream file{path, std::ios::binary | std::ios::trunc};
  file << text;
  file.close();
  if (!file) {
    return Error{ErrorCode::unavailable, fmt::format("trace {}: {} bytes not written: {}", path,
                                                     text.size(), std::strerror(errno))};
  }
  return {};
}

std::shared_ptr<TraceTrack> Tracer::track(std::string name) {
  return impl_->track(std::move(name));
}

}  // namespace kvshard
