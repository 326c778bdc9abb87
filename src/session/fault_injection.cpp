#include "kvshard/fault_injection.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "base/mutex.hpp"
#include "base/try.hpp"
#include "base/unique_fd.hpp"

namespace kvshard {

// What a plan's decorators share. Gates register a descriptor that release() makes readable.
struct FaultPlan::State {
  explicit State(Decide decide_) : decide{std::move(decide_)} {}

  Fault meet(FaultPoint point) {
    const MutexLock lock{mutex};
    Fault fault = decide(point, points++);
    if (fault.kind == Fault::Kind::hold && released) fault.kind = Fault::Kind::none;
    if (fault.kind != Fault::Kind::none) ++fired;
    return fault;
  }
  // The error that a call returns at once, or ok.
  Status meet_call(FaultPoint point) {
    const Fault fault = meet(point);
    return fault.kind == Fault::Kind::fail ? injected(fault) : Status{};
  }
  static Status injected(const Fault& fault) { return Error{fault.code, "injected fault"}; }
  void count_holding(int change) {
    const MutexLock lock{mutex};
    holding += static_cast<std::uint64_t>(change);
    changed.notify_all();
  }
  void watch(int fd) {
    const MutexLock lock{mutex};
    wake_fds.push_back(fd);
  }
  void unwatch(int fd) {
    const MutexLock lock{mutex};
    std::erase(wake_fds, fd);
  }

  mutable Mutex mutex;
  mutable std::condition_variable_any changed;
  Decide decide;
  std::uint64_t points{0}, fired{0}, holding{0};
  std::atomic<bool> released{false};
  std::vector<int> wake_fds;
};

FaultPlan::FaultPlan(Decide decide) : state_{std::make_unique<State>(std::move(decide))} {}
FaultPlan::~FaultPlan() = default;

std::shared_ptr<FaultPlan> FaultPlan::nth(std::uint64_t n, Fault fault) {
  return std::make_shared<FaultPlan>(
      [=](FaultPoint, std::uint64_t number) { return number == n ? fault : Fault{}; });
}

std::shared_ptr<FaultPlan> FaultPlan::first(FaultPoint point, Fault fault) {
  return std::make_shared<FaultPlan>([=, met = false](FaultPoint here, std::uint64_t) mutable {
    return here == point && !std::exchange(met, true) ? fault : Fault{};
  });
}

std::uint64_t FaultPlan::points() const noexcept {
  const MutexLock lock{state_->mutex};
  return state_->points;
}
std::uint64_t FaultPlan::fired() const noexcept {
  const MutexLock lock{state_->mutex};
  return state_->fired;
}
std::uint64_t FaultPlan::holding() const noexcept {
  const MutexLock lock{state_->mutex};
  return state_->holding;
}

bool FaultPlan::wait_holding(std::uint64_t count, std::chrono::milliseconds limit) const {
  std::unique_lock lock{state_->mutex};
  return state_->changed.wait_for(lock, limit, [&] { return state_->holding >= count; });
}

void FaultPlan::release() noexcept {
  const MutexLock lock{state_->mutex};
  state_->released = true;
  const std::uint64_t one = 1;
  for (const int fd : state_->wake_fds) {
    [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
  }
}

namespace {

using Clock = std::chrono::steady_clock;

// Keeps a decorator's operations that do not go on yet. Used on the decorator's thread only.
class Gate {
 public:
  using Go = std::function<void(Status)>;  // ok, or the injected error

  static Result<std::unique_ptr<Gate>> create(std::shared_ptr<FaultPlan> plan) {
    UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    UniqueFd timer{::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)};
    if (!wake || !timer)
      return Error{ErrorCode::resource_exhausted, fmt::format("eventfd: {}", std::strerror(errno))};
    return std::make_unique<Gate>(std::move(plan), std::move(wake), std::move(timer));
  }
  Gate(std::shared_ptr<FaultPlan> plan, UniqueFd wake, UniqueFd timer)
      : plan_{std::move(plan)}, wake_{std::move(wake)}, timer_{std::move(timer)} {
    state().watch(wake_.get());
  }
  ~Gate() {
    state().unwatch(wake_.get());
    for (const Kept& kept : kept_) let_go(kept);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  [[nodiscard]] FaultPlan::State& state() noexcept { return plan_->state(); }
  [[nodiscard]] int wake_fd() const noexcept { return wake_.get(); }
  [[nodiscard]] int timer_fd() const noexcept { return timer_.get(); }

  void pass(FaultPoint point, const Fault& fault, const void* owner, Go go) {
    // What waited for the next operation of this kind goes after this one.
    for (Kept& kept : kept_) {
      if (kept.fault.kind == Fault::Kind::reorder && kept.point == point) kept.due = Clock::now();
    }
    switch (fault.kind) {
      case Fault::Kind::none:
      case Fault::Kind::duplicate:
        return go({});
      case Fault::Kind::fail:
        return go(FaultPlan::State::injected(fault));
      case Fault::Kind::delay:
      case Fault::Kind::hold:
      case Fault::Kind::reorder:
        break;
    }
    // With nothing behind it, a reordered operation goes on after a while.
    const auto due = fault.kind == Fault::Kind::delay     ? Clock::now() + fault.delay
                     : fault.kind == Fault::Kind::reorder ? Clock::now() + kReorderLimit
                                                          : Clock::time_point::max();
    kept_.push_back({point, fault, due, owner, {}, std::move(go)});
    if (fault.kind == Fault::Kind::hold) state().count_holding(1);
    set_timer();
  }

  // Ends all that `owner` keeps here; told from progress().
  void cancel(const void* owner) {
    for (Kept& kept : kept_) {
      if (kept.owner != owner) continue;
      kept.due = Clock::time_point::min();
      kept.status = Error{ErrorCode::cancelled, "the endpoint was closed"};
    }
  }

  [[nodiscard]] bool has_due() const noexcept {
    const auto now = Clock::now();
    return std::any_of(kept_.begin(), kept_.end(), [&](const Kept& k) { return is_due(k, now); });
  }

  std::size_t progress() {
    std::uint64_t drained = 0;
    [[maybe_unused]] auto got = ::read(wake_.get(), &drained, sizeof drained);
    if (kept_.empty()) return 0;
    got = ::read(timer_.get(), &drained, sizeof drained);
    std::vector<Kept> due;
    const auto now = Clock::now();
    for (auto it = kept_.begin(); it != kept_.end();) {
      if (!is_due(*it, now)) {
        ++it;
        continue;
      }
      let_go(*it);
      due.push_back(std::move(*it));
      it = kept_.erase(it);
    }
    set_timer();
    for (Kept& kept : due) kept.go(std::move(kept.status));
    return due.size();
  }

 private:
  static constexpr std::chrono::milliseconds kReorderLimit{20};

  struct Kept {
    FaultPoint point;
    Fault fault;
    Clock::time_point due;
    const void* owner;
    Status status;
    Go go;
  };

  [[nodiscard]] bool is_due(const Kept& kept, Clock::time_point now) const noexcept {
    if (kept.due <= now) return true;
    return kept.fault.kind == Fault::Kind::hold && plan_->state().released;
  }
  void let_go(const Kept& kept) {
    if (kept.fault.kind == Fault::Kind::hold) state().count_holding(-1);
  }
  void set_timer() {
    auto next = Clock::time_point::max();
    for (const Kept& kept : kept_) next = std::min(next, kept.due);
    itimerspec when{};
    if (next != Clock::time_point::max()) {
      const auto left = std::max<Clock::duration>(next - Clock::now(), std::chrono::nanoseconds{1});
      when.it_value.tv_sec = static_cast<time_t>(left / std::chrono::seconds{1});
      when.it_value.tv_nsec = static_cast<long>((left % std::chrono::seconds{1}).count());
    }
    (void)::timerfd_settime(timer_.get(), 0, &when, nullptr);
  }

  std::shared_ptr<FaultPlan> plan_;
  UniqueFd wake_, timer_;
  std::list<Kept> kept_;
};

// ---- transport -------------------------------------------------------------------------------------

class FaultEndpoint final : public Endpoint {
 public:
  FaultEndpoint(std::unique_ptr<Endpoint> inner, Gate& gate)
      : inner_{std::move(inner)}, gate_{gate} {}
  ~FaultEndpoint() override { KVSHARD_ASSERT(operations_.empty()); }

  Status probe(std::span<std::byte> local, TransferListener& listener) override {
    return start(FaultPoint::probe, 0, local, listener);
  }
  [[nodiscard]] const PathReport& path() const noexcept override { return inner_->path(); }
  Status fetch(std::uint64_t offset, std::span<std::byte> local,
               TransferListener& listener) override {
    return start(FaultPoint::fetch, offset, local, listener);
  }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return operations_.size(); }
  void close() noexcept override {
    inner_->close();
    gate_.cancel(this);
  }
  [[nodiscard]] bool closed() const noexcept override {
    return operations_.empty() && inner_->closed();
  }

 private:
  struct Operation final : TransferListener {
    Operation(FaultEndpoint& endpoint_, FaultPoint point_, std::uint64_t offset_,
              std::span<std::byte> local_, TransferListener& listener_, bool again_)
        : endpoint{endpoint_},
          point{point_},
          offset{offset_},
          local{local_},
          listener{listener_},
          again{again_} {}
    void transfer_done(Status status) noexcept override {
      if (status && std::exchange(again, false) && run()) return;
      const FaultPoint end =
          point == FaultPoint::fetch ? FaultPoint::fetch_end : FaultPoint::probe_end;
      endpoint.gate_.pass(end, endpoint.gate_.state().meet(end), &endpoint,
                          [this, status = std::move(status)](Status injected) mutable {
                            finish(injected ? std::move(status) : std::move(injected));
                          });
    }
    Status run() {
      return point == FaultPoint::fetch ? endpoint.inner_->fetch(offset, local, *this)
                                        : endpoint.inner_->probe(local, *this);
    }
    void finish(Status status) {
      TransferListener& hears = listener;
      endpoint.operations_.erase(self);  // first: the listener may destroy a closed endpoint
      hears.transfer_done(std::move(status));
    }

    FaultEndpoint& endpoint;
    FaultPoint point;
    std::uint64_t offset;
    std::span<std::byte> local;
    TransferListener& listener;
    bool again;
    std::list<Operation>::iterator self;
  };

  Status start(FaultPoint point, std::uint64_t offset, std::span<std::byte> local,
               TransferListener& listener) {
    const Fault fault = gate_.state().meet(point);
    if (fault.kind == Fault::Kind::fail) return FaultPlan::State::injected(fault);
    operations_.emplace_back(*this, point, offset, local, listener,
                             fault.kind == Fault::Kind::duplicate && point == FaultPoint::fetch);
    Operation& operation = operations_.back();
    operation.self = std::prev(operations_.end());
    if (fault.kind == Fault::Kind::none || fault.kind == Fault::Kind::duplicate) {
      Status started = operation.run();
      if (!started) operations_.erase(operation.self);  // the caller hears it
      gate_.pass(point, fault, this, [](Status) {});
      return started;
    }
    gate_.pass(point, fault, this, [&operation](Status go) {
      if (go) go = operation.run();
      if (!go) operation.finish(std::move(go));
    });
    return {};
  }

  std::unique_ptr<Endpoint> inner_;
  Gate& gate_;
  std::list<Operation> operations_;
};

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, std::unique_ptr<Gate> gate, UniqueFd epoll)
      : inner_{std::move(inner)}, gate_{std::move(gate)}, epoll_{std::move(epoll)} {}

  [[nodiscard]] std::string_view kind() const noexcept override { return inner_->kind(); }
  [[nodiscard]] std::span<const std::byte> address() const noexcept override {
    return inner_->address();
  }
  Result<std::unique_ptr<RegisteredMemory>> register_memory(std::span<std::byte> bytes,
                                                            MemoryKind kind) override {
    KVSHARD_TRY(gate_->state().meet_call(FaultPoint::register_memory));
    return inner_->register_memory(bytes, kind);
  }
  Status serve(const RegisteredMemory& memory) override {
    KVSHARD_TRY(gate_->state().meet_call(FaultPoint::serve));
    return inner_->serve(memory);
  }
  Result<std::unique_ptr<Endpoint>> connect(std::span<const std::byte> address,
                                            std::span<const std::byte> packed,
                                            EndpointListener& listener) override {
    KVSHARD_TRY(gate_->state().meet_call(FaultPoint::connect));
    KVSHARD_TRY(auto endpoint, inner_->connect(address, packed, listener));
    return std::make_unique<FaultEndpoint>(std::move(endpoint), *gate_);
  }
  std::size_t progress() noexcept override { return inner_->progress() + gate_->progress(); }
  [[nodiscard]] int wake_fd() const noexcept override { return epoll_ ? epoll_.get() : -1; }
  bool arm() noexcept override { return !gate_->has_due() && inner_->arm(); }

 private:
  std::unique_ptr<Transport> inner_;
  std::unique_ptr<Gate> gate_;
  UniqueFd epoll_;  // readable when the inner transport's descriptor or the gate's are; empty: poll
};

// ---- copy engine -----------------------------------------------------------------------------------

class FaultCopyEngine final : public CopyEngine {
 public:
  FaultCopyEngine(std::unique_ptr<CopyEngine> inner, std::unique_ptr<Gate> gate)
      : inner_{std::move(inner)}, gate_{std::move(gate)} {}

  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return inner_->memory_kind(); }
  [[nodiscard]] int device() const noexcept override { return inner_->device(); }
  Status submit(const CopyJob& job, CopyListener& listener) override {
    const bool gather = job.direction == CopyJob::Direction::gather;
    const FaultPoint point = gather ? FaultPoint::gather : FaultPoint::scatter;
    const Fault fault = gate_->state().meet(point);
    if (fault.kind == Fault::Kind::fail) return FaultPlan::State::injected(fault);
    operations_.emplace_back(*this, job, listener);
    Operation& operation = operations_.back();
    operation.self = std::prev(operations_.end());
    if (fault.kind == Fault::Kind::none || fault.kind == Fault::Kind::duplicate) {
      Status taken = inner_->submit(operation.job, operation);
      if (!taken) operations_.erase(operation.self);
      gate_->pass(point, fault, this, [](Status) {});
      return taken;
    }
    gate_->pass(point, fault, this, [this, &operation](Status go) {
      if (go) go = inner_->submit(operation.job, operation);
      if (!go) operation.finish(std::move(go));
    });
    return {};
  }
  std::size_t progress() noexcept override { return inner_->progress() + gate_->progress(); }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return operations_.size(); }
  [[nodiscard]] int wake_fd() const noexcept override { return -1; }
  [[nodiscard]] bool fired(EventHandle event) const noexcept override {
    return inner_->fired(event);
  }
  Result<std::unique_ptr<StreamGate>> hold(StreamHandle stream) override {
    return inner_->hold(stream);
  }

 private:
  struct Operation final : CopyListener {
    Operation(FaultCopyEngine& engine_, const CopyJob& job_, CopyListener& listener_)
        : engine{engine_}, job{job_}, listener{listener_} {
      job.batches = keep(job_.batches, batches);
      job.sources = keep(job_.sources, sources);
    }
    std::span<const FragmentBatch> keep(std::span<const FragmentBatch> from,
                                        std::vector<FragmentBatch>& to) {
      for (const FragmentBatch& batch : from) {
        buffers.emplace_back(batch.buffers.begin(), batch.buffers.end());
        offsets.emplace_back(batch.offsets.begin(), batch.offsets.end());
        to.push_back({buffers.back(), offsets.back(), batch.shape});
      }
      return to;
    }
    void copy_done(Status status) noexcept override {
      const FaultPoint end = job.direction == CopyJob::Direction::gather ? FaultPoint::gather_end
                                                                         : FaultPoint::scatter_end;
      engine.gate_->pass(end, engine.gate_->state().meet(end), &engine,
                         [this, status = std::move(status)](Status injected) mutable {
                           finish(injected ? std::move(status) : std::move(injected));
                         });
    }
    void finish(Status status) {
      CopyListener& hears = listener;
      engine.operations_.erase(self);
      hears.copy_done(std::move(status));
    }

    FaultCopyEngine& engine;
    CopyJob job;
    CopyListener& listener;
    std::list<Operation>::iterator self;
    std::list<std::vector<std::byte*>> buffers;  // the caller's may be gone when a held job starts
    std::list<std::vector<std::uint64_t>> offsets;
    std::vector<FragmentBatch> batches, sources;
  };

  std::unique_ptr<CopyEngine> inner_;
  std::unique_ptr<Gate> gate_;
  std::list<Operation> operations_;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_fault_transport(std::unique_ptr<Transport> inner,
                                                        std::shared_ptr<FaultPlan> plan) {
  KVSHARD_TRY(auto gate, Gate::create(std::move(plan)));
  UniqueFd epoll;
  if (inner->wake_fd() >= 0) {
    epoll = UniqueFd{::epoll_create1(EPOLL_CLOEXEC)};
    for (const int fd : {inner->wake_fd(), gate->wake_fd(), gate->timer_fd()}) {
      epoll_event event{};
      event.events = EPOLLIN;
      if (!epoll || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0)
        return Error{ErrorCode::resource_exhausted, fmt::format("epoll: {}", std::strerror(errno))};
    }
  }
  return std::make_unique<FaultTransport>(std::move(inner), std::move(gate), std::move(epoll));
}

std::unique_ptr<CopyEngine> make_fault_copy_engine(std::unique_ptr<CopyEngine> inner,
                                                   std::shared_ptr<FaultPlan> plan) {
  auto gate = Gate::create(std::move(plan));
  if (!gate) return nullptr;
  return std::make_unique<FaultCopyEngine>(std::move(inner), std::move(gate).value());
}

}  // namespace kvshard
