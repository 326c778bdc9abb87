#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/try.hpp"
#include "kvshard/kvshard.h"
#include "kvshard/result.hpp"

// What every function of the C API goes through: errors as codes, and structs of other sizes than ours.
namespace kvshard::c_api {

/// Zero-terminated, and cut between two characters where it is too long.
void copy_text(std::string_view text, char* to, std::size_t capacity) noexcept;
int32_t report(const Status& status, kvshard_error* error) noexcept;
int32_t report(ErrorCode code, std::string_view message, kvshard_error* error) noexcept;

/// Runs the body of a function, which returns a Status. Nothing is thrown from here.
template <typename Body>
int32_t guarded(kvshard_error* error, Body&& body) noexcept {
  try {
    return report(body(), error);
  } catch (const std::bad_alloc&) {
    return report(ErrorCode::resource_exhausted, "out of memory", error);
  } catch (const std::exception& thrown) {
    return report(ErrorCode::internal, thrown.what(), error);
  } catch (...) {
    return report(ErrorCode::internal, "unknown exception", error);
  }
}

/// invalid_argument when `pointer` is null.
Status required(const void* pointer, const char* name);
/// Likewise, unless there are none.
Status required_array(const void* pointer, std::uint64_t count, const char* name);

/// Whether a caller's struct of `size` bytes can be one of ours, of whatever version.
Status check_size(std::uint32_t size, const char* name);
/// Whether what a caller's struct has beyond ours is zero: it asks for nothing that we do not know.
Status check_tail(const void* given, std::size_t ours, std::uint32_t size, const char* name);

/// A caller's struct as ours, for reading: what an older one lacks is zero.
template <typename T>
Result<T> read(const T* given, const char* name) {
  KVSHARD_TRY(required(given, name));
  const std::uint32_t size = given->size;
  KVSHARD_TRY(check_size(size, name));
  KVSHARD_TRY(check_tail(given, sizeof(T), size, name));
  T ours{};
  std::memcpy(&ours, given, size < sizeof(T) ? size : sizeof(T));
  return ours;
}

template <typename T>
const T* element(const T* first, std::size_t stride, std::size_t i) noexcept {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(first) + i * stride);
}
template <typename T>
T* element(T* first, std::size_t stride, std::size_t i) noexcept {
  return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(first) + i * stride);
}

template <typename T>
Result<std::vector<T>> read_array(const T* first, std::uint32_t count, const char* name) {
  std::vector<T> ours;
  if (count == 0) return ours;
  KVSHARD_TRY(required(first, name));
  const std::uint32_t stride = first->size;
  for (std::uint32_t i = 0; i < count; ++i) {
    const T* const at = element(first, stride, i);
    if (at->size != stride) {
      return Error{ErrorCode::invalid_argument, std::string{name} + " " + std::to_string(i) +
                                                    " has size " + std::to_string(at->size) +
                                                    ", the first has " + std::to_string(stride)};
    }
    KVSHARD_TRY(const T one, read(at, name));
    ours.push_back(one);
  }
  return ours;
}

/// Fills a caller's struct of `size` bytes; what a newer one has besides becomes zero.
template <typename T>
void write(T value, T* to, std::uint32_t size) noexcept {
  value.size = size;
  std::memcpy(to, &value, size < sizeof(T) ? size : sizeof(T));
  if (size > sizeof(T))
    std::memset(reinterpret_cast<std::byte*>(to) + sizeof(T), 0, size - sizeof(T));
}

/// A caller's struct that is to be filled, as it is: the caller's pointers and capacities are in it.
template <typename T>
Result<T> to_fill(const T* given, const char* name) {
  KVSHARD_TRY(required(given, name));
  KVSHARD_TRY(check_size(given->size, name));
  T ours{};
  std::memcpy(&ours, given, given->size < sizeof(T) ? given->size : sizeof(T));
  return ours;
}

/// `value` where it is not 0, else what the option holds: its default.
template <typename Option, typename Value>
void set_option(Option& option, Value value) {
  if (value != 0) option = static_cast<Option>(value);
}
inline std::string text_or(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

/// An enum of the C++ API, whose values are [first, last].
template <typename Enum>
Result<Enum> to_enum(std::int32_t value, Enum first, Enum last, const char* name) {
  if (value < static_cast<std::int32_t>(first) || value > static_cast<std::int32_t>(last)) {
    return Error{ErrorCode::invalid_argument,
                 std::string{name} + " " + std::to_string(value) + " is none that there is"};
  }
  return static_cast<Enum>(value);
}

Result<std::uint16_t> to_port(std::uint32_t port);

/// Page numbers of a caller as ours. Copied: the two are different types to the compiler.
template <typename Page>
Result<std::vector<Page>> to_pages(const std::uint32_t* pages, std::uint64_t count) {
  KVSHARD_TRY(required_array(pages, count, "pages"));
  if (count > 0xffff'ffff) {
    return Error{ErrorCode::invalid_argument, std::to_string(count) + " pages exceed 32 bits"};
  }
  std::vector<Page> ours(count);
  if (count != 0) std::memcpy(ours.data(), pages, count * sizeof(Page));
  return ours;
}

}  // namespace kvshard::c_api
