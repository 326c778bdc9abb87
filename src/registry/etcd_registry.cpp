#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "base/clock.hpp"
#include "base/try.hpp"
#include "kvshard/registry.hpp"
#include "registry/etcd_json.hpp"
#include "registry/http.hpp"
#include "registry/in_context.hpp"
#include "registry/rank_json.hpp"

namespace kvshard {
namespace {

using std::chrono::milliseconds;

TimePoint now() {
  return SteadyClock::instance().now();
}

// What ends a call.
struct Bound {
  TimePoint deadline;
  const std::stop_token& stop;
};

// The members of one etcd cluster, any of which will do. The one that answered last is asked first.
class Endpoints {
 public:
  explicit Endpoints(std::vector<http::Address> addresses) : addresses_{std::move(addresses)} {
    for (const auto& address : addresses_)
      name_ += (name_.empty() ? "etcd " : ",") + http::to_string(address);
  }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// One exchange, with the first that gives an answer which `decode` takes. Each gets an equal
  /// share of the time that is left, so one that hangs leaves time for the others. A request may
  /// thus arrive twice.
  template <typename Decode>
  auto call(std::string_view target, const std::string& body, const Bound& bound, Decode decode)
      -> decltype(decode(std::string_view{})) {
    const std::size_t first = preferred_.load(std::memory_order_relaxed);
    std::string failures;
    for (std::size_t tried = 0; tried < addresses_.size(); ++tried) {
      const std::size_t index = (first + tried) % addresses_.size();
      const TimePoint start = now();
      const auto left = static_cast<std::int64_t>(addresses_.size() - tried);
      auto answer = ask(addresses_[index], {"POST", std::string{target}, body},
                        {start + (bound.deadline - start) / left, bound.stop}, decode);
      if (answer) {
        preferred_.store(index, std::memory_order_relaxed);  // a hint, which orders nothing
        return answer;
      }
      if (answer.error().code == ErrorCode::cancelled ||
          answer.error().code == ErrorCode::resource_exhausted)
        return answer;
      failures += (failures.empty() ? "" : "; ") + answer.error().message;
    }
    return Error{now() >= bound.deadline ? ErrorCode::deadline_exceeded : ErrorCode::unavailable,
                 std::move(failures)};
  }

 private:
  template <typename Decode>
  static auto ask(const http::Address& address, const http::Request& request, const Bound& bound,
                  const Decode& decode) -> decltype(decode(std::string_view{})) {
    const std::string context = "etcd " + http::to_string(address);
    auto response = http::fetch(address, request, bound.deadline, bound.stop);
    if (!response) return in_context(context, std::move(response).error());
    const auto& [status, type, body] = response.value();
    if (status != 200) return in_context(context, etcd::decode_failure(status, body));
    auto answer = decode(body);
    if (!answer) return in_context(context, std::move(answer).error());
    return answer;
  }

  const std::vector<http::Address> addresses_;
  std::string name_;
  std::atomic<std::size_t> preferred_{0};
};

// Each rank is one key, under a lease of its own. Nothing is remembered here: the key says which
// incarnation holds the place, and under which lease, so that a restart of either side, or another
// Registry object in this process, changes nothing.
class EtcdRegistry final : public Registry {
 public:
  EtcdRegistry(std::vector<http::Address> addresses, EtcdOptions options)
      : endpoints_{std::move(addresses)}, options_{std::move(options)} {}

  Result<milliseconds> announce(const RankAnnouncement& rank, milliseconds timeout,
                                std::stop_token stop) override {
    return list(rank, /*displace=*/true, {now() + timeout, stop});
  }
  Result<milliseconds> renew(const RankAnnouncement& rank, milliseconds timeout,
                             std::stop_token stop) override {
    return list(rank, /*displace=*/false, {now() + timeout, stop});
  }

  Status withdraw(const RankAnnouncement& rank, milliseconds timeout,
                  std::stop_token stop) override {
    KVSHARD_TRY(validate(rank));
    const Bound bound{now() + timeout, stop};
    const std::string key = etcd::rank_key(options_.key_prefix, rank);
    while (true) {
      KVSHARD_TRY(const View view, look(rank, bound));
      if (!view.own) return {};
      const auto listed = etcd::decode_entry(options_.key_prefix, *view.own);
      if (!listed || listed.value().incarnation != rank.incarnation) return {};
      // Its lease, which holds nothing now, runs out.
      KVSHARD_TRY(const bool done,
                  commit(etcd::Txn{}.when({key, {}}, view.own->mod_revision).erase(key), bound));
      if (done) return {};
    }
  }

  Result<std::vector<RankAnnouncement>> ranks(std::string_view group, milliseconds timeout,
                                              std::stop_token stop) override {
    KVSHARD_TRY(check_name("group name", group));
    KVSHARD_TRY(const auto answer,
                txn(etcd::Txn{}.read(etcd::group_keys(options_.key_prefix, group)),
                    {now() + timeout, stop}));
    std::vector<RankAnnouncement> ranks;
    for (const etcd::Entry& entry : answer.entries) {
      auto rank = etcd::decode_entry(options_.key_prefix, entry);
      if (!rank) return in_context(std::move(rank).error());
      ranks.push_back(std::move(rank).value());
    }
    if (Status sane = check_listing(ranks, group); !sane)
      return in_context(std::move(sane).error());
    return ranks;
  }

 private:
  // What decides whether a rank may be listed: its own place, and any one other rank of its epoch.
  // One is enough, as all that are listed agree.
  struct View {
    std::optional<etcd::Entry> own;
    std::optional<etcd::Entry> sibling;
  };

  Result<milliseconds> list(const RankAnnouncement& rank, bool displace, const Bound& bound) {
    KVSHARD_TRY(validate(rank));
    const std::string value = encode_rank(rank);
    std::optional<etcd::Lease> lease;
    while (true) {
      KVSHARD_TRY(const View view, look(rank, bound));
      if (view.own && view.own->value == value) {
        KVSHARD_TRY(const milliseconds left, keep_alive(view.own->lease, bound));
        if (left > milliseconds{0}) return left;
        // The lease is gone, and its key with it or soon: a new one.
      } else if (view.own && !displace) {
        // What cannot be read holds no place.
        const auto listed = etcd::decode_entry(options_.key_prefix, *view.own);
        if (listed && listed.value().incarnation != rank.incarnation)
          return in_context(displaced(rank, listed.value().incarnation));
      }
      if (view.sibling) {
        auto sibling = etcd::decode_entry(options_.key_prefix, *view.sibling);
        if (!sibling) return in_context(std::move(sibling).error());
        if (Status same = check_same_group(sibling.value(), rank); !same)
          return in_context(std::move(same).error());
      }
      if (!lease) {
        KVSHARD_TRY(lease,
                    endpoints_.call("/v3/lease/grant", etcd::encode_grant(options_.time_to_live),
                                    bound, etcd::decode_grant));
      }
      KVSHARD_TRY(const bool done, commit(put(rank, value, lease->id, view), bound));
      if (done) return lease->time_to_live;
    }
  }

  // Lists the rank if what was seen is still so.
  [[nodiscard]] etcd::Txn put(const RankAnnouncement& rank, std::string_view value,
                              std::int64_t lease, const View& view) const {
    const std::string key = etcd::rank_key(options_.key_prefix, rank);
    etcd::Txn txn;
    txn.when({key, {}}, view.own ? view.own->mod_revision : 0);
    if (view.sibling) {
      txn.when({view.sibling->key, {}}, view.sibling->mod_revision);
    } else {
      for (const auto& keys : etcd::sibling_keys(options_.key_prefix, rank)) txn.when(keys, 0);
    }
    return txn.put(key, value, lease);
  }

  Result<View> look(const RankAnnouncement& rank, const Bound& bound) {
    const std::string key = etcd::rank_key(options_.key_prefix, rank);
    etcd::Txn reads;
    reads.read({key, {}});
    for (const auto& keys : etcd::sibling_keys(options_.key_prefix, rank)) reads.read(keys, 1);
    KVSHARD_TRY(auto answer, txn(reads, bound));
    View view;
    for (etcd::Entry& entry : answer.entries)
      (entry.key == key ? view.own : view.sibling) = std::move(entry);
    return view;
  }

  Result<etcd::TxnAnswer> txn(const etcd::Txn& txn, const Bound& bound) {
    return endpoints_.call("/v3/kv/txn", txn.body(), bound, etcd::decode_txn);
  }
  Result<bool> commit(const etcd::Txn& changes, const Bound& bound) {
    KVSHARD_TRY(const auto answer, txn(changes, bound));
    return answer.succeeded;
  }
  Result<milliseconds> keep_alive(std::int64_t lease, const Bound& bound) {
    return endpoints_.call("/v3/lease/keepalive", etcd::encode_keep_alive(lease), bound,
                           etcd::decode_keep_alive);
  }

  [[nodiscard]] Error in_context(Error error) const {
    return kvshard::in_context(endpoints_.name(), std::move(error));
  }

  Endpoints endpoints_;
  const EtcdOptions options_;
};

}  // namespace

Result<std::unique_ptr<Registry>> make_etcd_registry(std::string_view endpoints,
                                                     const EtcdOptions& options) {
  constexpr std::chrono::seconds kLongest = std::chrono::hours{24};
  if (options.time_to_live <= std::chrono::seconds{0} || options.time_to_live > kLongest)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("time_to_live is {} s, 1 to {} are possible",
                             options.time_to_live.count(), kLongest.count())};
  KVSHARD_TRY(check_name("key_prefix", options.key_prefix));
  std::vector<http::Address> addresses;
  for (std::string_view rest = endpoints;;) {
    const auto comma = std::min(rest.find(','), rest.size());
    KVSHARD_TRY(http::Address address, http::parse_address(rest.substr(0, comma)));
    if (address.port == 0)
      return Error{ErrorCode::invalid_argument, fmt::format("'{}': port is 0", endpoints)};
    addresses.push_back(std::move(address));
    if (comma == rest.size()) break;
    rest.remove_prefix(comma + 1);
  }
  return std::make_unique<EtcdRegistry>(std::move(addresses), options);
}

}  // namespace kvshard
