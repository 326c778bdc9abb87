#include "transport/ucx/connection.hpp"

#include <utility>

#include "base/assert.hpp"
#include "base/log.hpp"

namespace kvshard::ucx {
namespace {

// How late a peer's word may be. One that is gone is found sooner.
constexpr std::chrono::seconds kSettleLimit{5};

}  // namespace

Result<std::unique_ptr<Connection>> Connection::open(ucp_worker_h worker,
                                                     std::span<const std::byte> worker_address,
                                                     bool& failure_noted) {
  std::unique_ptr<Connection> made{new Connection{failure_noted}};
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
  params.address = reinterpret_cast<const ucp_address_t*>(worker_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t status) {
    static_cast<Connection*>(self)->fail(status);
  };
  params.err_handler.arg = made.get();
  params.user_data = made.get();
  if (const auto status = ucp_ep_create(worker, &params, &made->endpoint_); status != UCS_OK) {
    made->endpoint_ = nullptr;
    return ucx_error("ucp_ep_create", status);
  }
  return made;
}

void Connection::fail(ucs_status_t status) noexcept {
  if (endpoint_ == nullptr || failure_ != UCS_OK) return;  // our own closing is no failure
  failure_ = status;
  failure_noted_ = true;
}

void Connection::send_note(Message message, std::uint64_t path,
                           std::span<const std::byte> data) noexcept {
  auto& header = notes_[message == Message::hello ? 0 : 1];
  header = MessageHeader{.path = path};
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.user_data = this;
  param.cb.send = [](void* request, ucs_status_t, void* self) {
    ucp_request_free(request);
    static_cast<Connection*>(self)->end();
  };
  begin();
  const auto request = ucp_am_send_nbx(endpoint_, static_cast<unsigned>(message), &header,
                                       sizeof header, data.data(), data.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  end();
  if (request != nullptr) fail(UCS_PTR_STATUS(request));
}

Connection::~Connection() {
  KVSHARD_ASSERT(idle());
}

void Connection::close() noexcept {
  if (std::exchange(closing_, true)) return;
  close_by_ = std::chrono::steady_clock::now() + kSettleLimit;
  progress_close();
}

void Connection::progress_close() noexcept {
  if (!closing_ || endpoint_ == nullptr) return;
  if (settled_ || failure_ != UCS_OK || std::chrono::steady_clock::now() >= close_by_)
    force_close();
}

void Connection::force_close() noexcept {
  if (endpoint_ == nullptr) return;
  closing_ = true;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.user_data = this;
  param.cb.send = [](void* request, ucs_status_t, void* self) {
    ucp_request_free(request);
    static_cast<Connection*>(self)->end();
  };
  begin();
  const auto request = ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  end();
  if (request != nullptr)
    log::warning("ucx endpoint not closed: {}", ucs_status_string(UCS_PTR_STATUS(request)));
}

}  // namespace kvshard::ucx
