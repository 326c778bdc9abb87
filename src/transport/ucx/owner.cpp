#include "transport/ucx/owner.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/log.hpp"
#include "transport/envelope.hpp"
#include "transport/ucx/memory.hpp"

namespace kvshard::ucx {
namespace {

// A peer opens one path for each endpoint; far above any group, far below trouble.
constexpr std::size_t kMaxPaths = 4096;

}  // namespace

Owner::~Owner() {
  KVSHARD_ASSERT(paths_.empty() && idle());
}

void Owner::withdraw() noexcept {
  served_ = {};
  if (answering_ > 0) close();
}

void Owner::close() noexcept {
  for (auto path = paths_.begin(); path != paths_.end();) path = close_path(path);
  for (const auto& connection : closing_) connection->force_close();
}

void Owner::settle(std::uint64_t path) noexcept {
  for (const auto& connection : closing_)
    if (connection->path() == path) connection->settle();
}

Owner::Paths::iterator Owner::close_path(Paths::iterator path) {
  retire(std::move(path->second));
  return paths_.erase(path);
}

void Owner::retire(std::unique_ptr<Connection> connection) {
  connection->close();
  closing_.push_back(std::move(connection));
}

void Owner::received(Message message, const MessageHeader& header,
                     std::span<const std::byte> data) {
  inbox_.push_back({message, header, {data.begin(), data.end()}});
}

std::size_t Owner::progress() {
  std::size_t events = 0;
  if (std::exchange(failure_noted_, false)) {
    for (auto path = paths_.begin(); path != paths_.end();)
      path = path->second->failure() == UCS_OK ? std::next(path) : close_path(path);
    ++events;
  }
  for (; !inbox_.empty(); inbox_.pop_front(), ++events) {
    const auto& next = inbox_.front();
    switch (next.message) {
      case Message::hello:
        open_path(next);
        break;
      case Message::request:
        answer(next.header);
        break;
      case Message::bye:
        if (const auto path = paths_.find(next.header.path); path != paths_.end()) close_path(path);
        break;
      case Message::welcome:
      case Message::answer:
      case Message::refusal:
        KVSHARD_ASSERT(false);
    }
  }
  events += std::erase_if(closing_, [](const auto& connection) {
    connection->progress_close();
    return connection->idle();
  });
  return events;
}

void Owner::open_path(const Received& hello) {
  const auto key = hello.header.path;
  if (paths_.contains(key) || paths_.size() >= kMaxPaths) return;
  const auto address = transport::unseal(transport::EnvelopeKind::ucx_address, hello.address);
  if (!address) {
    log::warning("ucx requester refused: {}", address.error().message);
    return;
  }
  auto connection = Connection::open(worker_, *address, failure_noted_);
  if (!connection) {
    log::warning("ucx requester not reached: {}", connection.error().message);
    return;
  }
  auto& path = *paths_.emplace(key, std::move(*connection)).first->second;
  path.settle();
  send(path, Message::welcome, {.path = key}, {});
}

void Owner::answer(const MessageHeader& request) {
  const auto path = paths_.find(request.path);
  // Without a way back there is no answer; the requester's deadline ends its fetch.
  if (path == paths_.end() || !path->second->usable()) return;
  auto& connection = *path->second;
  const auto size = served_.bytes.size();
  if (served_.handle == nullptr) return refuse(connection, request.fetch, Refusal::not_served);
  if (request.offset > size || request.length > size - request.offset || request.length == 0)
    return refuse(connection, request.fetch, Refusal::out_of_range);
  send(connection, Message::answer, {.fetch = request.fetch, .length = request.length},
       served_.bytes.subspan(request.offset, request.length));
}

void Owner::refuse(Connection& connection, std::uint64_t fetch, Refusal reason) {
  send(connection, Message::refusal,
       {.fetch = fetch,
        .offset = static_cast<std::uint64_t>(reason),
        .length = served_.bytes.size()},
       {});
}

void Owner::send(Connection& connection, Message message, const MessageHeader& header,
                 std::span<const std::byte> data) {
  if (free_.empty()) free_.push_back(&answers_.emplace_back());
  auto* answer = free_.back();
  free_.pop_back();
  *answer = Answer{.owner = this, .connection = &connection, .header = header};

  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.user_data = answer;
  param.cb.send = [](void* request, ucs_status_t, void* user_data) {
    // A failed send needs no word here: the connection's own failure follows, or came before.
    auto* sent = static_cast<Answer*>(user_data);
    ucp_request_free(request);
    sent->connection->end();
    --sent->owner->answering_;
    sent->owner->free_.push_back(sent);
  };
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  if (!data.empty()) {
    param.flags = UCP_AM_SEND_FLAG_RNDV;  // never eager: the bytes go straight from the slot
    describe_memory(param, served_.handle, served_.kind);
  }
  connection.begin();
  ++answering_;
  const auto request =
      ucp_am_send_nbx(connection.handle(), static_cast<unsigned>(message), &answer->header,
                      sizeof answer->header, data.data(), data.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  connection.end();
  --answering_;
  free_.push_back(answer);
  // Without this word the requester would wait for its deadline.
  if (UCS_PTR_IS_ERR(request) && message == Message::answer && connection.usable())
    refuse(connection, header.fetch, Refusal::send_failed);
}

}  // namespace kvshard::ucx
