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

/// A value or an Error, shaped like C++23's std::expected.
///
/// value() and operator* require ok(); error() requires !ok(). Both are undefined otherwise, as with a
/// null pointer.
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

  T& value() & noexcept { return *std::get_if<0>(&state_); }
  const T& value() const& noexcept { return *std::get_if<0>(&state_); }
  T&& value() && noexcept { return std::move(*std::get_if<0>(&state_)); }
  T& operator*() & noexcept { return value(); }
  const T& operator*() const& noexcept { return value(); }
  T&& operator*() && noexcept { return std::move(*this).value(); }
  T* operator->() noexcept { return &value(); }
  const T* operator->() const noexcept { return &value(); }

  Error& error() & noexcept { return *std::get_if<1>(&state_); }
  const Error& error() const& noexcept { return *std::get_if<1>(&state_); }
  Error&& error() && noexcept { return std::move(*std::get_if<1>(&state_)); }

  template <typename U>
  T value_or(U&& fallback) const& {
    return ok() ? value() : static_cast<T>(std::forward<U>(fallback));
  }

 private:
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
  void value() const noexcept {}

  Error& error() & noexcept { return error_; }
  const Error& error() const& noexcept { return error_; }
  Error&& error() && noexcept { return std::move(error_); }

 private:
  Error error_;
  bool ok_{true};
};

using Status = Result<void>;

}  // namespace kvshard
