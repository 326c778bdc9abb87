#include "kvshard/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <random>
#include <thread>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/mutex.hpp"
#include "base/try.hpp"
#include "registry/http.hpp"
#include "registry/in_context.hpp"
#include "registry/rank_json.hpp"
#include "registry/rank_table.hpp"

namespace kvshard {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr milliseconds kAttemptTimeout = 2s;
constexpr milliseconds kWithdrawTimeout = 1s;

// Trying again may help: the registry was not reached, or did not make sense, or is full.
bool may_pass(ErrorCode code) noexcept {
  return code == ErrorCode::unavailable || code == ErrorCode::deadline_exceeded ||
         code == ErrorCode::resource_exhausted;
}

TimePoint now() {
  return SteadyClock::instance().now();
}
milliseconds until(TimePoint deadline) {
  return std::max(std::chrono::ceil<milliseconds>(deadline - now()), milliseconds{0});
}

// Waits that double, with jitter so that ranks started together do not ask together.
class BackOff {
 public:
  milliseconds next() {
    const auto wait = jitter(next_);
    next_ = std::min(next_ * 2, kLongest);
    return wait;
  }
  void reset() noexcept { next_ = kShortest; }
  /// Between half of `wait` and all of it.
  milliseconds jitter(milliseconds wait) {
    return milliseconds{
        std::uniform_int_distribution<std::int64_t>{wait.count() / 2, wait.count()}(random_)};
  }

 private:
  static constexpr milliseconds kShortest = 20ms;
  static constexpr milliseconds kLongest = 1s;
  milliseconds next_{kShortest};
  std::minstd_rand random_{std::random_device{}()};
};

// A wait that a stop request ends at once.
class Pause {
 public:
  void wait(milliseconds time, const std::stop_token& stop) {
    std::unique_lock lock{mutex_};
    condition_.wait_for(lock, stop, time, [] { return false; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable_any condition_;
};

// Calls `attempt` with the time it may take until it succeeds, is refused, or `timeout` has passed.
template <typename Attempt>
auto retry(milliseconds timeout, const std::stop_token& stop, const Attempt& attempt)
    -> decltype(attempt(timeout)) {
  const TimePoint deadline = now() + timeout;
  BackOff back_off;
  Pause pause;
  std::string failure;
  for (std::uint64_t attempts = 1;; ++attempts) {
    auto result = attempt(std::min(until(deadline), kAttemptTimeout));
    if (result || !may_pass(result.error().code)) return result;
    const milliseconds left = until(deadline);
    // An attempt that the deadline cut short says less than the one before it.
    if (failure.empty() || left > 0ms) failure = std::move(result.error().message);
    if (left == 0ms)
      return Error{ErrorCode::deadline_exceeded, fmt::format("after {} ms and {} attempts: {}",
                                                             timeout.count(), attempts, failure)};
    pause.wait(std::min(back_off.next(), left), stop);
    if (stop.stop_requested()) return Error{ErrorCode::cancelled, "stopped by the caller"};
  }
}

class HttpRegistry final : public Registry {
 public:
  explicit HttpRegistry(http::Address address) : address_{std::move(address)} {}

  Result<milliseconds> announce(const RankAnnouncement& rank, milliseconds timeout,
                                std::stop_token stop) override {
    return put("/v1/announce", rank, timeout, stop);
  }
  Result<milliseconds> renew(const RankAnnouncement& rank, milliseconds timeout,
                             std::stop_token stop) override {
    return put("/v1/renew", rank, timeout, stop);
  }
  Status withdraw(const RankAnnouncement& rank, milliseconds timeout,
                  std::stop_token stop) override {
    KVSHARD_TRY(validate(rank));
    KVSHARD_TRY(exchange({"POST", "/v1/withdraw", encode_rank(rank)}, timeout, stop));
    return {};
  }
  Result<std::vector<RankAnnouncement>> ranks(std::string_view group, milliseconds timeout,
                                              std::stop_token stop) override {
    KVSHARD_TRY(check_name("group name", group));
    KVSHARD_TRY(const std::string body,
                exchange({"GET", fmt::format("/v1/groups/{}", group), {}}, timeout, stop));
    auto ranks = decode_ranks(body, group);
    if (!ranks) return in_context(std::move(ranks).error());
    return ranks;
  }

 private:
  Result<milliseconds> put(std::string_view target, const RankAnnouncement& rank,
                           milliseconds timeout, const std::stop_token& stop) {
    KVSHARD_TRY(validate(rank));
    KVSHARD_TRY(const std::string body,
                exchange({"POST", std::string{target}, encode_rank(rank)}, timeout, stop));
    auto time_to_live = decode_time_to_live(body);
    if (!time_to_live) return in_context(std::move(time_to_live).error());
    return time_to_live;
  }

  Result<std::string> exchange(const http::Request& request, milliseconds timeout,
                               const std::stop_token& stop) {
    auto response = http::fetch(address_, request, now() + timeout, stop);
    if (!response) return in_context(std::move(response).error());
    if (response.value().status != 200) return in_context(decode_error(response.value().body));
    return std::move(response.value().body);
  }

  Error in_context(Error error) const {
    return kvshard::in_context(fmt::format("registry {}", http::to_string(address_)),
                               std::move(error));
  }

  const http::Address address_;
};

}  // namespace

Result<std::unique_ptr<Registry>> make_http_registry(std::string_view address) {
  KVSHARD_TRY(http::Address parsed, http::parse_address(address));
  if (parsed.port == 0)
    return Error{ErrorCode::invalid_argument, fmt::format("'{}': port is 0", address)};
  return std::make_unique<HttpRegistry>(std::move(parsed));
}

Result<std::unique_ptr<Registry>> make_registry(std::string_view address) {
  constexpr std::string_view kEtcd = "etcd://";
  if (!address.starts_with(kEtcd)) return make_http_registry(address);
  address.remove_prefix(kEtcd.size());
  const auto slash = std::min(address.find('/'), address.size());
  EtcdOptions options;
  if (const auto path = address.substr(slash); path.size() > 1)
    options.key_prefix = fmt::format("{}{}", path, path.ends_with('/') ? "" : "/");
  return make_etcd_registry(address.substr(0, slash), options);
}

Result<GroupSpec> wait_for_group(Registry& registry, std::string_view group, milliseconds timeout,
                                 std::stop_token stop) {
  auto found = retry(timeout, stop, [&](milliseconds attempt) -> Result<GroupSpec> {
    KVSHARD_TRY(const auto ranks, registry.ranks(group, attempt, stop));
    return select_group(group, ranks);
  });
  if (!found)
    return in_context(fmt::format("group '{}' not found", group), std::move(found).error());
  return found;
}

class Announcement::Impl {
 public:
  Impl(Registry& registry, RankAnnouncement rank, milliseconds time_to_live)
      : registry_{registry},
        rank_{std::move(rank)},
        thread_{[this, time_to_live](const std::stop_token& stop) { run(stop, time_to_live); }} {}
  ~Impl() {
    thread_.request_stop();
    thread_.join();
    // What stays listed expires.
    if (Status withdrawn = registry_.withdraw(rank_, kWithdrawTimeout); !withdrawn)
      log::info("rank not withdrawn: {}", withdrawn.error().message);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Status status() {
    const MutexLock lock{mutex_};
    return status_;
  }

 private:
  void run(const std::stop_token& stop, milliseconds time_to_live) {
    Pause pause;
    BackOff back_off;
    milliseconds wait = back_off.jitter(time_to_live / 3);
    while (true) {
      pause.wait(wait, stop);
      if (stop.stop_requested()) return;
      auto renewed = registry_.renew(rank_, kAttemptTimeout, stop);
      if (stop.stop_requested()) return;
      const bool was_ok = status().ok();
      set_status(renewed ? Status{} : Status{renewed.error()});
      if (renewed) {
        if (!was_ok)
          log::info("rank listed again: group {}, rank {}", rank_.group, rank_.shard_rank);
        back_off.reset();
        wait = back_off.jitter(std::max(renewed.value() / 3, 1ms));
      } else if (may_pass(renewed.error().code)) {
        if (was_ok)
          log::warning("rank not renewed: {}", renewed.error().message);  // once per outage
        wait = back_off.next();
      } else {
        return log::error("rank refused by the registry: {}", renewed.error().message);
      }
    }
  }

  void set_status(Status status) {
    const MutexLock lock{mutex_};
    status_ = std::move(status);
  }

  Registry& registry_;
  const RankAnnouncement rank_;
  Mutex mutex_;
  Status status_ KVSHARD_GUARDED_BY(mutex_);
  std::jthread thread_;
};

Result<std::unique_ptr<Announcement>> Announcement::start(Registry& registry, RankAnnouncement rank,
                                                          milliseconds timeout) {
  auto listed =
      retry(timeout, {}, [&](milliseconds attempt) { return registry.announce(rank, attempt); });
  if (!listed)
    return in_context(fmt::format("group '{}', rank {} not listed", rank.group, rank.shard_rank),
                      std::move(listed).error());
  return std::unique_ptr<Announcement>{
      new Announcement{std::make_unique<Impl>(registry, std::move(rank), listed.value())}};
}

Announcement::Announcement(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
Announcement::~Announcement() = default;
Status Announcement::status() const {
  return impl_->status();
}

}  // namespace kvshard
