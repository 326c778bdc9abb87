#include <prometheus/check_names.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/mutex.hpp"
#include "base/try.hpp"
#include "kvshard/decode_rank.hpp"
#include "kvshard/metrics.hpp"
#include "kvshard/prefill_rank.hpp"
#include "kvshard/prometheus.hpp"
#include "prometheus/families.hpp"
#include "registry/http.hpp"

// Of prometheus-cpp only the format is used. Its server has SIGPIPE ignored, on a thread of its own and so
// at any time, though the disposition is the engine's; it knows no IPv6 here; and it says of an address
// that cannot be bound only that.
namespace kvshard {
namespace {

// What is exported now.
class Ranks {
 public:
  using Append = std::function<void(Families&)>;

  explicit Ranks(Labels common) : common_{std::move(common)} {}

  // False when `key` is there already.
  bool add(const std::string& key, Append&& append) {
    const MutexLock lock{mutex_};
    return ranks_.try_emplace(key, std::move(append)).second;
  }
  // Waits for a scrape that is reading them.
  void remove(const std::string& key) {
    const MutexLock lock{mutex_};
    ranks_.erase(key);
  }

  [[nodiscard]] std::string text() const {
    Families families{common_};
    {
      const MutexLock lock{mutex_};
      for (const auto& [key, append] : ranks_) append(families);
    }
    std::ostringstream out;
    prometheus::TextSerializer{}.Serialize(out, families.take());
    return std::move(out).str();
  }

 private:
  const Labels common_;
  mutable Mutex mutex_;
  std::map<std::string, Append> ranks_ KVSHARD_GUARDED_BY(mutex_);
};

Result<Labels> common_labels(const PrometheusOptions& options) {
  constexpr std::array<std::string_view, 14> kOurs{
      "code", "decode_rank", "epoch", "fallback", "field",  "get_native", "group",
      "le",   "outcome",     "path",  "quantile", "reason", "shard_rank", "stage"};
  Labels labels;
  for (const auto& [name, value] : options.labels) {
    const char* wrong = nullptr;
    if (!prometheus::CheckLabelName(name)) wrong = "is not a label's name";
    if (std::ranges::find(kOurs, name) != kOurs.end()) wrong = "is one of our own";
    if (std::ranges::find(labels, name, &Labels::value_type::name) != labels.end())
      wrong = "is given twice";
    if (wrong != nullptr)
      return Error{ErrorCode::invalid_argument, "metrics label \"" + name + "\" " + wrong};
    labels.push_back({name, value});
  }
  return labels;
}

}  // namespace

class PrometheusExporter::Impl {
 public:
  explicit Impl(Labels common) : ranks_{std::make_shared<Ranks>(std::move(common))} {}

  Status serve(std::string_view address) {
    KVSHARD_TRY(const http::Address where, http::parse_address(address));
    KVSHARD_TRY(server_, http::Server::start(where, [this](const http::Request& request) {
                  return answer(request);
                }));
    return {};
  }

  std::shared_ptr<Ranks> ranks() const noexcept { return ranks_; }
  std::uint16_t port() const noexcept { return server_ ? server_->address().port : 0; }

 private:
  [[nodiscard]] http::Response answer(const http::Request& request) const {
    if (request.method != "GET") return {405, kText, "only GET is served\n"};
    if (request.target.substr(0, request.target.find('?')) != "/metrics")
      return {404, kText, "not here: try /metrics\n"};
    return {200, kText, ranks_->text()};
  }

  static constexpr const char* kText = "text/plain; version=0.0.4; charset=utf-8";

  const std::shared_ptr<Ranks> ranks_;
  std::unique_ptr<http::Server> server_;
};

class ExportedRank::Entry {
 public:
  static Result<ExportedRank> create(std::shared_ptr<Ranks> ranks, std::string key,
                                     Ranks::Append append) {
    if (!ranks->add(key, std::move(append)))
      return Error{ErrorCode::invalid_argument, key + " is exported already"};
    return ExportedRank{std::unique_ptr<Entry>{new Entry{std::move(ranks), std::move(key)}}};
  }
  ~Entry() { ranks_->remove(key_); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  Entry(std::shared_ptr<Ranks> ranks, std::string key)
      : ranks_{std::move(ranks)}, key_{std::move(key)} {}

  const std::shared_ptr<Ranks> ranks_;
  const std::string key_;
};

ExportedRank::ExportedRank(std::unique_ptr<Entry> entry) noexcept : entry_{std::move(entry)} {}
ExportedRank::ExportedRank(ExportedRank&& other) noexcept = default;
ExportedRank& ExportedRank::operator=(ExportedRank&& other) noexcept = default;
ExportedRank::~ExportedRank() = default;

Result<std::unique_ptr<PrometheusExporter>> PrometheusExporter::create(
    const PrometheusOptions& options) {
  KVSHARD_TRY(auto labels, common_labels(options));
  auto impl = std::make_unique<Impl>(std::move(labels));
  if (!options.address.empty()) {
    KVSHARD_TRY(impl->serve(options.address));
  }
  return std::unique_ptr<PrometheusExporter>{new PrometheusExporter{std::move(impl)}};
}

PrometheusExporter::PrometheusExporter(std::unique_ptr<Impl> impl) noexcept
    : impl_{std::move(impl)} {}
PrometheusExporter::~PrometheusExporter() = default;

Result<ExportedRank> PrometheusExporter::add(const PrefillRank& rank) {
  const RankAnnouncement self = rank.announcement();
  return ExportedRank::Entry::create(
      impl_->ranks(), "prefill rank " + std::to_string(self.shard_rank) + " of group " + self.group,
      [&rank](Families& families) { append(families, rank.metrics()); });
}

Result<ExportedRank> PrometheusExporter::add(const DecodeRank& rank, const std::string& name) {
  return ExportedRank::Entry::create(
      impl_->ranks(), "decode rank " + printable(name),
      [&rank, name](Families& families) { append(families, rank.metrics(), name); });
}

std::uint16_t PrometheusExporter::port() const noexcept {
  return impl_->port();
}

std::string PrometheusExporter::text() const {
  return impl_->ranks()->text();
}

}  // namespace kvshard
