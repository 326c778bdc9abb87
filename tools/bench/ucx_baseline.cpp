#include "bench/ucx_baseline.hpp"

#ifdef KVSHARD_HAVE_UCX

#include <fmt/format.h>
#include <ucp/api/ucp.h>

#include <cstdlib>
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

/// What the library sets too and what decides speed; the user's environment wins.
Result<ucp_context_h> make_context(MemoryKind kind) {
  ucp_config_t* config = nullptr;
  KVSHARD_TRY(check("ucp_config_read", ucp_config_read(nullptr, nullptr, &config)));
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  if ((major > 1 || minor >= 16) && std::getenv("UCX_MAX_RMA_RAILS") == nullptr)
    (void)ucp_config_modify(config, "MAX_RMA_RAILS", "2");
  if (kind == MemoryKind::cuda && std::getenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == nullptr)
    (void)ucp_config_modify(config, "CUDA_IPC_ENABLE_GET_ZCOPY", "on");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  const Status made = check("ucp_init", ucp_init(&params, config, &context));
  ucp_config_release(config);
  if (!made) return made.error();
  return context;
}

}  // namespace

struct UcxBaseline::State {
  struct Memory {
    std::span<std::byte> bytes;
    ucp_mem_h handle{nullptr};
  };

  MemoryKind kind{MemoryKind::host};
  ucp_context_h context{nullptr};
  ucp_worker_h worker{nullptr};
  Memory slots, pool;
  ucp_ep_h endpoint{nullptr};
  Remote self;
  std::uint64_t sender_slots{0}, sender_pool{0};  // receiver: where the sender's memory is
  ucp_rkey_h slots_key{nullptr}, pool_key{nullptr};
  Want want{};  // receiver: the batch; sender: what is left of it is `to_send`
  std::uint64_t to_send{0};
  std::uint64_t sent{0};
  std::uint64_t sending{0};
  std::uint64_t arrived{0};
  std::uint64_t landed{0};
  Status failure;

  ~State() {
    // The reply endpoint of the sender is UCX's own and goes with the worker.
    for (const ucp_rkey_h key : {slots_key, pool_key})
      if (key != nullptr) ucp_rkey_destroy(key);
    for (const Memory& memory : {slots, pool})
      if (memory.handle != nullptr) (void)ucp_mem_unmap(context, memory.handle);
    if (worker != nullptr) ucp_worker_destroy(worker);
    if (context != nullptr) ucp_cleanup(context);
  }

  Status map(Memory& memory, std::span<std::byte> bytes, Remote::Memory& described) {
    memory.bytes = bytes;
    ucp_mem_map_params_t map{};
    map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                     UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    map.address = bytes.data();
    map.length = bytes.size();
    map.memory_type = memory_type();
    KVSHARD_TRY(check("ucp_mem_map", ucp_mem_map(context, &map, &memory.handle)));
    void* key = nullptr;
    std::size_t size = 0;
    KVSHARD_TRY(check("ucp_rkey_pack", ucp_rkey_pack(context, memory.handle, &key, &size)));
    const auto* const from = static_cast<const std::byte*>(key);
    described.key.assign(from, from + size);
    described.at = reinterpret_cast<std::uint64_t>(bytes.data());
    ucp_rkey_buffer_release(key);
    return {};
  }
  [[nodiscard]] ucs_memory_type_t memory_type() const {
    return kind == MemoryKind::cuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  }
  [[nodiscard]] std::span<std::byte> part(std::uint64_t index) const {
    return slots.bytes.subspan((index % want.depth) * want.bytes, want.bytes);
  }
  void describe(ucp_request_param_t& param, const Memory& memory) const {
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH;
    param.memory_type = memory_type();
    param.memh = memory.handle;
  }
  void ended(ucs_status_t status) {
    ++landed;
    if (status != UCS_OK && failure) failure = check("bare operation", status);
  }
  static void on_sent(void* request, ucs_status_t, void* self) {
    ucp_request_free(request);
    --static_cast<State*>(self)->sending;
  }
  static void on_landed(void* request, ucs_status_t status, std::size_t, void* self) {
    ucp_request_free(request);
    static_cast<State*>(self)->ended(status);
  }
  static void on_got(void* request, ucs_status_t status, void* self) {
    on_landed(request, status, 0, self);
  }
  static ucs_status_t on_want(void* self, const void* header, std::size_t size, void*, std::size_t,
                              const ucp_am_recv_param_t* param) {
    auto& state = *static_cast<State*>(self);
    if (size != sizeof(Want) || (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0)
      return UCS_OK;
    std::memcpy(&state.want, header, sizeof(Want));
    if (state.want.depth * state.want.bytes > state.slots.bytes.size()) return UCS_OK;
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
    state.describe(receive, state.slots);
    receive.user_data = &state;
    receive.cb.recv_am = &on_landed;
    const auto into = state.part(state.arrived++);
    const auto request =
        ucp_am_recv_data_nbx(state.worker, data, into.data(), into.size(), &receive);
    if (!UCS_PTR_IS_PTR(request)) state.ended(UCS_PTR_STATUS(request));
    return UCS_INPROGRESS;
  }
  void send_next() {
    ucp_request_param_t param{};
    describe(param, slots);
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
UcxBaseline::~UcxBaseline() = default;

Result<std::unique_ptr<UcxBaseline>> UcxBaseline::create(std::span<std::byte> slots,
                                                         std::span<std::byte> pool,
                                                         MemoryKind kind) {
  std::unique_ptr<UcxBaseline> made{new UcxBaseline};
  auto& state = *made->state_;
  state.kind = kind;
  KVSHARD_TRY(state.context, make_context(kind));
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  KVSHARD_TRY(
      check("ucp_worker_create", ucp_worker_create(state.context, &worker_params, &state.worker)));
  KVSHARD_TRY(state.map(state.slots, slots, state.self.slots));
  if (!pool.empty()) KVSHARD_TRY(state.map(state.pool, pool, state.self.pool));
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
  state.self.address.assign(bytes, bytes + size);
  ucp_worker_release_address(state.worker, address);
  return made;
}

const UcxBaseline::Remote& UcxBaseline::remote() const noexcept {
  return state_->self;
}
std::uint64_t UcxBaseline::landed() const noexcept {
  return state_->landed;
}
Status UcxBaseline::status() const {
  return state_->failure;
}

Status UcxBaseline::connect(const Remote& sender) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(sender.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;  // as the library has it: it decides the transports
  params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) {};
  KVSHARD_TRY(check("ucp_ep_create", ucp_ep_create(state_->worker, &params, &state_->endpoint)));
  state_->sender_slots = sender.slots.at;
  state_->sender_pool = sender.pool.at;
  for (const auto& [packed, key] : {std::pair{&sender.slots.key, &state_->slots_key},
                                    std::pair{&sender.pool.key, &state_->pool_key}}) {
    if (packed->empty()) continue;
    KVSHARD_TRY(
        check("ucp_ep_rkey_unpack", ucp_ep_rkey_unpack(state_->endpoint, packed->data(), key)));
  }
  return {};
}

Status UcxBaseline::start(std::uint64_t count, std::uint64_t bytes, std::uint64_t depth) {
  if (depth == 0 || bytes == 0 || depth * bytes > state_->slots.bytes.size())
    return Error{ErrorCode::invalid_argument, fmt::format("{} times {} bytes into {}", depth, bytes,
                                                          state_->slots.bytes.size())};
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

Status UcxBaseline::get(Region from, std::uint64_t offset, std::span<std::byte> local) {
  const State::Memory& into =
      local.data() >= state_->slots.bytes.data() &&
              local.data() < state_->slots.bytes.data() + state_->slots.bytes.size()
          ? state_->slots
          : state_->pool;
  ucp_request_param_t param{};
  state_->describe(param, into);
  param.user_data = state_.get();
  param.cb.send = &State::on_got;
  const bool slots = from == Region::slots;
  const auto request = ucp_get_nbx(state_->endpoint, local.data(), local.size(),
                                   (slots ? state_->sender_slots : state_->sender_pool) + offset,
                                   slots ? state_->slots_key : state_->pool_key, &param);
  if (UCS_PTR_IS_ERR(request)) return check("ucp_get_nbx", UCS_PTR_STATUS(request));
  if (request == nullptr) state_->ended(UCS_OK);
  return {};
}

std::size_t UcxBaseline::progress() noexcept {
  const std::size_t events = ucp_worker_progress(state_->worker);
  while (state_->to_send > 0 && state_->sending < state_->want.depth) state_->send_next();
  return events;
}

std::string ucx_version() {
  return ucp_get_version_string();
}

}  // namespace kvshard::bench

#else

namespace kvshard::bench {

struct UcxBaseline::State {};

UcxBaseline::UcxBaseline() = default;
UcxBaseline::~UcxBaseline() = default;

namespace {
const Error kNoUcx{ErrorCode::unsupported, "this build has no UCX"};
}

Result<std::unique_ptr<UcxBaseline>> UcxBaseline::create(std::span<std::byte>, std::span<std::byte>,
                                                         MemoryKind) {
  return kNoUcx;
}
const UcxBaseline::Remote& UcxBaseline::remote() const noexcept {
  static const Remote none;
  return none;
}
Status UcxBaseline::connect(const Remote&) {
  return kNoUcx;
}
Status UcxBaseline::start(std::uint64_t, std::uint64_t, std::uint64_t) {
  return kNoUcx;
}
Status UcxBaseline::get(Region, std::uint64_t, std::span<std::byte>) {
  return kNoUcx;
}
std::uint64_t UcxBaseline::landed() const noexcept {
  return 0;
}
Status UcxBaseline::status() const {
  return kNoUcx;
}
std::size_t UcxBaseline::progress() noexcept {
  return 0;
}
std::string ucx_version() {
  return "none";
}

}  // namespace kvshard::bench

#endif
