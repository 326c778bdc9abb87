#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "kvshard/export.hpp"

namespace kvshard {

/// Names what the caller does next. The values travel on the wire and never change.
enum class ErrorCode : std::uint8_t {
  invalid_argument = 1,     ///< fix the call
  failed_precondition = 2,  ///< wrong state or unequal layouts: bootstrap again
  resource_exhausted = 3,   ///< no pages, staging or credits now: wait or shed load
  unavailable = 4,          ///< peer gone: choose another
  deadline_exceeded = 5,    ///< the bound on a wait passed
  cancelled = 6,            ///< either side gave the operation up
  data_loss = 7,            ///< discard the pages
  unsupported = 8,          ///< not possible here: see the message
  internal = 9,             ///< our bug: report it
};

/// The code's name as spelled above, for logs and metrics; "unknown" for any other value.
KVSHARD_EXPORT std::string_view to_string(ErrorCode code) noexcept;

/// A failure: what to do next, and a sentence that holds the numbers that decided.
///
/// Owns:    its message.
/// Threads: thread-compatible value.
struct [[nodiscard]] Error {
  ErrorCode code{ErrorCode::internal};
  std::string message;
};

namespace detail {
/// Ends the process; `error` is its last word, on stderr.
[[noreturn]] KVSHARD_EXPORT void no_value(const Error& error) noexcept;
}  // namespace detail

/// A value or an Error, shaped like C++23's std::expected.
///
/// value() and operator* require ok(); error() requires !ok(). Without it value() ends the process with the
/// error's message, and the others are undefined, as with a null pointer.
/// Threads: thread-compatible value.
template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;

  Result(const T& value) : state_{std::in_place_index<0>, value} {}
  Result(T&& value) : state_{std::in_place_index<0>, std::move(value)} {}
  Result(Error error) : state_{std::in_place_index<1>, std::move(error)} {}
  /// Converts where T does (a unique_ptr to a derived class, say).
  template <typename U>
  requires(std::is_convertible_v<U&&, T> && !std::is_same_v<std::remove_cvref_t<U>, Result> &&
           !std::is_same_v<std::remove_cvref_t<U>, Error> &&
           !std::is_same_v<std::remove_cvref_t<U>, T>) Result(U&& value)
      : state_{std::in_place_index<0>, std::forward<U>(value)} {}

  [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
  [[nodiscard]] bool has_value() const noexcept { return ok(); }
  explicit operator bool() const noexcept { return ok(); }

  T& value() & noexcept { return require_value(), **this; }
  const T& value() const& noexcept { return require_value(), **this; }
  T&& value() && noexcept { return require_value(), *std::move(*this); }
  T& operator*() & noexcept { return *std::get_if<0>(&state_); }
  const T& operator*() const& noexcept { return *std::get_if<0>(&state_); }
  T&& operator*() && noexcept { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() noexcept { return &**this; }
  const T* operator->() const noexcept { return &**this; }

  Error& error() & noexcept { return *std::get_if<1>(&state_); }
  const Error& error() const& noexcept { return *std::get_if<1>(&state_); }
  Error&& error() && noexcept { return std::move(*std::get_if<1>(&state_)); }

  template <typename U>
  T value_or(U&& fallback) const& {
    return ok() ? **this : static_cast<T>(std::forward<U>(fallback));
  }

 private:
  void require_value() const noexcept {
    if (!ok()) detail::no_value(error());
  }

  std::variant<T, Error> state_;
};

/// Success, or an Error.
template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;

  Result() noexcept = default;
  Result(Error error) : error_{std::move(error)}, ok_{false} {}

  [[nodiscard]] bool ok() const noexcept { return ok_; }
  [[nodiscard]] bool has_value() const noexcept { return ok_; }
  explicit operator bool() const noexcept { return ok_; }
  void value() const noexcept {
    if (!ok_) detail::no_value(error_);
  }

  Error& error() & noexcept { return error_; }
  const Error& error() const& noexcept { return error_; }
  Error&& error() && noexcept { return std::move(error_); }

 private:
  Error error_;
  bool ok_{true};
};

using Status = Result<void>;

}  // namespace kvshard
