#include <fmt/format.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/try.hpp"
#include "kvshard/registry.hpp"
#include "registry/http.hpp"
#include "registry/rank_json.hpp"
#include "registry/rank_table.hpp"

namespace kvshard {
namespace {

using std::chrono::milliseconds;

http::Response text(int status, std::string body) {
  return {status, "text/plain; charset=utf-8", std::move(body)};
}
http::Response json(std::string body) {
  return {200, "application/json", std::move(body)};
}

http::Response refusal(const Error& error) {
  const int status = error.code == ErrorCode::invalid_argument     ? 400
                     : error.code == ErrorCode::resource_exhausted ? 503
                                                                   : 409;
  return {status, "application/json", encode_error(error)};
}

std::string table_for_people(const std::vector<ListedRank>& ranks) {
  std::string page =
      fmt::format("kvshard registry: {} ranks\n\n{:<24} {:>20} {:>9}  {:<28} {:>16} {:>9}\n",
                  ranks.size(), "group", "epoch", "rank", "address", "incarnation", "heard");
  for (const auto& [rank, age] : ranks)
    page += fmt::format("{:<24} {:>20} {:>4} of {:<4} {:<28} {:>16x} {:>6} ms\n", rank.group,
                        rank.epoch, rank.shard_rank, rank.shard_size,
                        http::to_string({rank.host, rank.port}), rank.incarnation, age.count());
  return page;
}

}  // namespace

class RegistryServer::Impl {
 public:
  explicit Impl(milliseconds time_to_live) : time_to_live_{time_to_live}, table_{time_to_live} {}

  Status listen(const http::Address& address) {
    KVSHARD_TRY(server_, http::Server::start(address, [this](const http::Request& request) {
                  return answer(request);
                }));
    return {};
  }
  [[nodiscard]] const http::Address& address() const noexcept { return server_->address(); }

 private:
  // On the server's thread, as is all use of the table.
  http::Response answer(const http::Request& request) {
    constexpr std::string_view kGroup = "/v1/groups/";
    const TimePoint now = SteadyClock::instance().now();
    const std::string_view target = request.target;
    if (request.method == "GET") {
      if (target == "/") return text(200, table_for_people(table_.list({}, now)));
      if (target == "/health") return text(200, "ok\n");
      if (target == "/v1/groups") return json(encode_ranks(table_.list({}, now)));
      if (target.starts_with(kGroup) && target.size() > kGroup.size())
        return json(encode_ranks(table_.list(target.substr(kGroup.size()), now)));
    } else if (request.method == "POST") {
      if (target == "/v1/announce" || target == "/v1/renew" || target == "/v1/withdraw")
        return change(target, request.body, now);
    } else {
      return text(405, "only GET and POST are served\n");
    }
    return text(404, "not here: try /, /health, /v1/groups or /v1/groups/<name>\n");
  }

  http::Response change(std::string_view target, std::string_view body, TimePoint now) {
    const auto rank = decode_rank(body);
    if (!rank) return refusal(rank.error());
    Status changed;
    if (target == "/v1/announce") changed = table_.announce(rank.value(), now);
    if (target == "/v1/renew") changed = table_.renew(rank.value(), now);
    if (target == "/v1/withdraw") table_.withdraw(rank.value(), now);
    return changed ? json(encode_time_to_live(time_to_live_)) : refusal(changed.error());
  }

  const milliseconds time_to_live_;
  RankTable table_;  // the server's thread's own
  std::unique_ptr<http::Server> server_;
};

Result<std::unique_ptr<RegistryServer>> RegistryServer::start(
    const RegistryServerOptions& options) {
  constexpr milliseconds kLongest = std::chrono::hours{24};
  if (options.time_to_live <= milliseconds{0} || options.time_to_live > kLongest)
    return Error{ErrorCode::invalid_argument,
                 fmt::format("time_to_live is {} ms, 1 to {} are possible",
                             options.time_to_live.count(), kLongest.count())};
  auto impl = std::make_unique<Impl>(options.time_to_live);
  KVSHARD_TRY(impl->listen({options.host, options.port}));
  return std::unique_ptr<RegistryServer>{new RegistryServer{std::move(impl)}};
}

RegistryServer::RegistryServer(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
RegistryServer::~RegistryServer() = default;
std::string RegistryServer::address() const {
  return http::to_string(impl_->address());
}

}  // namespace kvshard
