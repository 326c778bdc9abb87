#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kvshard/copy_engine.hpp"
#include "kvshard/export.hpp"
#include "kvshard/result.hpp"
#include "kvshard/transport.hpp"

/// Fault seams for tests, an engine's own ones too: decorators that spoil chosen operations of any
/// transport and copy engine, and a proxy that spoils control connections. See docs/failure.md.
namespace kvshard {

/// Where a fault may strike. Each call of a transport or copy engine is one point, and so is each end of
/// an operation, just before its listener hears it.
enum class FaultPoint : std::uint8_t {
  register_memory,
  serve,
  connect,
  probe,
  probe_end,
  fetch,
  fetch_end,
  gather,
  gather_end,
  scatter,
  scatter_end,
};

struct Fault {
  enum class Kind : std::uint8_t {
    none,
    fail,     ///< the call returns, or the listener hears, an error with `code`
    delay,    ///< goes on after `delay`
    hold,     ///< goes on after FaultPlan::release(); never released: dropped. close() ends a fetch
    reorder,  ///< goes on after the next operation that goes on at the same kind of point
    duplicate,  ///< fetch only: the bytes move twice, the listener hears it once
  };
  Kind kind{Kind::none};
  std::chrono::microseconds delay{0};
  ErrorCode code{ErrorCode::unavailable};
};

/// Decides what happens to each operation of the decorators that share it.
///
/// Calls only know none and fail where they give a result at once (register_memory, serve, connect).
/// Threads: thread-safe; `decide` runs on ranks' progress threads, or where a rank is created, and must not
///          block or call into a rank. It may hold state of its own.
class KVSHARD_EXPORT FaultPlan {
 public:
  /// `number` counts this plan's points, from 0.
  using Decide = std::function<Fault(FaultPoint point, std::uint64_t number)>;
  explicit FaultPlan(Decide decide);
  ~FaultPlan();
  FaultPlan(const FaultPlan&) = delete;
  FaultPlan& operator=(const FaultPlan&) = delete;

  /// Spoils point number `n` and no other.
  static std::shared_ptr<FaultPlan> nth(std::uint64_t n, Fault fault);
  /// Spoils the first time that `point` is met.
  static std::shared_ptr<FaultPlan> first(FaultPoint point, Fault fault);

  [[nodiscard]] std::uint64_t points() const noexcept;   ///< met so far
  [[nodiscard]] std::uint64_t fired() const noexcept;    ///< of those, spoiled
  [[nodiscard]] std::uint64_t holding() const noexcept;  ///< operations held now
  /// Waits until at least `count` operations are held; false when `limit` passes first.
  bool wait_holding(std::uint64_t count, std::chrono::milliseconds limit) const;
  /// Lets go of all that is held, and of what `hold` would hold from now on.
  void release() noexcept;

  struct State;
  /// For the decorators.
  [[nodiscard]] State& state() noexcept { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// `inner` with the plan's faults. Its memory, addresses and kind are the inner ones, so that peers need no
/// decorator.
KVSHARD_EXPORT Result<std::unique_ptr<Transport>> make_fault_transport(
    std::unique_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan);
/// `inner` with the plan's faults. A held gather or scatter stays in flight until it is released.
/// Null when the process has no descriptors left.
KVSHARD_EXPORT std::unique_ptr<CopyEngine> make_fault_copy_engine(std::unique_ptr<CopyEngine> inner,
                                                                  std::shared_ptr<FaultPlan> plan);

/// A control message as the proxy sees it pass.
struct ProxiedFrame {
  bool to_prefill{true};  ///< else to decode
  std::uint8_t type{0};   ///< as in docs/wire_format.md, section 4: 1 HELLO, 2 WELCOME, 3 PULL, ...
  std::size_t bytes{0};   ///< header included
  std::uint64_t number{0};  ///< of the frame, over all connections and both directions, from 0
};

enum class FrameFate : std::uint8_t {
  pass,
  drop,
  duplicate,
  delay,    ///< goes on after ControlProxy::kDelay; frames behind it wait too, as TCP keeps order
  reorder,  ///< goes on after the next frame of its direction
  cut,      ///< both sides' connections are closed, and the frame is lost
};

/// Stands between decode ranks and one prefill rank's control socket. Data does not pass through it.
///
/// Owns:    a thread and its sockets.
/// Threads: thread-safe; `decide` runs on the proxy's thread and must not block or call the proxy.
class KVSHARD_EXPORT ControlProxy {
 public:
  static constexpr std::chrono::milliseconds kDelay{20};
  using Decide = std::function<FrameFate(const ProxiedFrame& frame)>;

  /// Forwards connections to its own port (on 127.0.0.1) to `host`:`port`. A null `decide` passes all.
  static Result<std::unique_ptr<ControlProxy>> create(const std::string& host, std::uint16_t port,
                                                      Decide decide = nullptr);
  ~ControlProxy();
  ControlProxy(const ControlProxy&) = delete;
  ControlProxy& operator=(const ControlProxy&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept;
  /// While silent, nothing is read or written, and no connection is accepted: the cable is cut.
  void set_silent(bool silent) noexcept;
  /// Closes all connections now; new ones are accepted.
  void cut() noexcept;

 private:
  class Impl;
  explicit ControlProxy(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
