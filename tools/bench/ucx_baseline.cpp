#include "support/ucx_baseline.hpp"

#include <fmt/format.h>
#include <ucp/api/ucp.h>

#include <cstring>
#include <utility>

#include "base/try.hpp"

namespace kvshard::bench {
namespace {

constexpr unsigned kWant = 1;
constexpr unsigned kBytes = 2;

/// What the receiver asks for.
struct Want {
  std::uint64_t count;
  std::uint64_t bytes;
  std::uint64_t depth;
};

Status check(const char* what, ucs_status_t status) {
  if (status == UCS_OK) return {};
  return Error{ErrorCode::internal, fmt::format("{}: {}", what, ucs_status_string(status))};
}

}  // namespace

struct UcxBaseline::State {
  std::span<std::byte> memory;
  ucp_context_h context{nullptr};
  ucp_worker_h worker{nullptr};
  ucp_mem_h handle{nullptr};
  ucp_ep_h endpoint{nullptr};
  std::vector<std::byte> address;
  Want want{};  // receiver: the batch; sender: what is left of it is `to_send`
  std::uint64_t to_send{0};
  std::uint64_t sent{0};
  std::uint64_t sending{0};
  std::uint64_t arrived{0};
  std::uint64_t landed{0};

  [[nodiscard]] std::span<std::byte> part(std::uint64_t index) const {
    return memory.subspan((index % want.depth) * want.bytes, want.bytes);
  }
  void describe(ucp_request_param_t& param) const {
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.memh = handle;
  }
  static void on_sent(void* request, ucs_status_t, void* self) {
    ucp_request_free(request);
    --static_cast<State*>(self)->sending;
  }
  static void on_landed(void* request, ucs_status_t status, std::size_t, void* self) {
    ucp_request_free(request);
    if (status == UCS_OK) ++static_cast<State*>(self)->landed;
  }
  static ucs_status_t on_want(void* self, const void* header, std::size_t size, void*, std::size_t,
                              const ucp_am_recv_param_t* param) {
    auto& state = *static_cast<State*>(self);
    if (size != sizeof(Want) || (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0)
      return UCS_OK;
    std::memcpy(&state.want, header, sizeof(Want));
    if (state.want.depth * state.want.bytes > state.memory.size()) return UCS_OK;
    state.endpoint = param->reply_ep;
    state.sent = 0;
    state.to_send = state.want.count;
    return UCS_OK;
  }
  static ucs_status_t on_bytes(void* self, const void*, std::size_t, void* data, std::size_t size,
                               const ucp_am_recv_param_t* param) {
    auto& state = *static_cast<State*>(self);
    if (size != state.want.bytes || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0)
      return UCS_OK;
    ucp_request_param_t receive{};
    state.describe(receive);
    receive.user_data = &state;
    receive.cb.recv_am = &on_landed;
    const auto into = state.part(state.arrived++);
    const auto request =
        ucp_am_recv_data_nbx(state.worker, data, into.data(), into.size(), &receive);
    if (UCS_PTR_IS_ERR(request)) return UCS_OK;
    if (request == nullptr) ++state.landed;
    return UCS_INPROGRESS;
  }
  void send_next() {
    ucp_request_param_t param{};
    describe(param);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_RNDV;
    param.user_data = this;
    param.cb.send = &on_sent;
    const auto from = part(sent);
    ++sent;
    --to_send;
    ++sending;
    const auto request =
        ucp_am_send_nbx(endpoint, kBytes, nullptr, 0, from.data(), from.size(), &param);
    if (!UCS_PTR_IS_PTR(request)) --sending;
  }
};

UcxBaseline::UcxBaseline() : state_{std::make_unique<State>()} {}

Result<std::unique_ptr<UcxBaseline>> UcxBaseline::create(std::span<std::byte> memory) {
  std::unique_ptr<UcxBaseline> made{new UcxBaseline};
  auto& state = *made->state_;
  state.memory = memory;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  KVSHARD_TRY(check("ucp_init", ucp_init(&params, nullptr, &state.context)));
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  KVSHARD_TRY(
      check("ucp_worker_create", ucp_worker_create(state.context, &worker_params, &state.worker)));
  ucp_mem_map_params_t map{};
  map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                   UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  map.address = memory.data();
  map.length = memory.size();
  map.memory_type = UCS_MEMORY_TYPE_HOST;
  KVSHARD_TRY(check("ucp_mem_map", ucp_mem_map(state.context, &map, &state.handle)));
  for (const auto& [id, callback] :
       {std::pair<unsigned, ucp_am_recv_callback_t>{kWant, &State::on_want},
        {kBytes, &State::on_bytes}}) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.cb = callback;
    handler.arg = &state;
    KVSHARD_TRY(check("ucp_worker_set_am_recv_handler",
                      ucp_worker_set_am_recv_handler(state.worker, &handler)));
  }
  ucp_address_t* address = nullptr;
  std::size_t size = 0;
  KVSHARD_TRY(
      check("ucp_worker_get_address", ucp_worker_get_address(state.worker, &address, &size)));
  const auto* const bytes = reinterpret_cast<const std::byte*>(address);
  state.address.assign(bytes, bytes + size);
  ucp_worker_release_address(state.worker, address);
  return made;
}

UcxBaseline::~UcxBaseline() {
  // The reply endpoint of the sender is UCX's own and goes with the worker.
  if (state_->handle != nullptr) (void)ucp_mem_unmap(state_->context, state_->handle);
  if (state_->worker != nullptr) ucp_worker_destroy(state_->worker);
  if (state_->context != nullptr) ucp_cleanup(state_->context);
}

std::span<const std::byte> UcxBaseline::address() const noexcept {
  return state_->address;
}
std::uint64_t UcxBaseline::landed() const noexcept {
  return state_->landed;
}

Status UcxBaseline::connect(std::span<const std::byte> address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;  // as the library has it: it decides the transports
  params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) {};
  return check("ucp_ep_create", ucp_ep_create(state_->worker, &params, &state_->endpoint));
}

Status UcxBaseline::start(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth) {
  if (depth == 0 || bytes == 0 || depth * bytes > state_->memory.size())
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{} times {} bytes into {}", depth, bytes, state_->memory.size())};
  state_->want = {.count = count, .bytes = bytes, .depth = depth};
  state_->arrived = 0;
  state_->landed = 0;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  const auto request = ucp_am_send_nbx(state_->endpoint, kWant, &state_->want, sizeof state_->want,
                                       nullptr, 0, &param);
  if (UCS_PTR_IS_ERR(request)) return check("ucp_am_send_nbx", UCS_PTR_STATUS(request));
  if (request != nullptr)
    ucp_request_free(request);  // `want` stays as it is until the next start()
  return {};
}

std::size_t UcxBaseline::progress() noexcept {
  const std::size_t events = ucp_worker_progress(state_->worker);
  while (state_->to_send > 0 && state_->sending < state_->want.depth) state_->send_next();
  return events;
}

}  // namespace kvshard::bench
