#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/clock.hpp"
#include "kvshard/limits.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// Which of the connections that come to a listener stay, by ControlLimits.
///
/// A new connection is never turned away: when too many handshakes are in flight the oldest ends, from
/// the same address where that address has too many. So an honest peer, whose handshake takes
/// two round trips, gets through a flood that would need as many connections in that time as the limit.
/// Pure: the caller closes what it is told to.
class Admission {
 public:
  using Id = std::uint64_t;

  explicit Admission(const ControlLimits& limits) : limits_{limits} {}

  /// A connection from `address` (without its port) begins. Returns the one that has to end for it.
  std::optional<Id> arrive(Id id, const std::string& address, TimePoint now);
  /// Its handshake went well. Errors: resource_exhausted, naming the limit; then it has to end.
  Status establish(Id id);
  /// It is closed. Idempotent.
  void leave(Id id);
  /// A handshake that takes longer than allowed, and so has to end.
  [[nodiscard]] std::optional<Id> overdue(TimePoint now) const;

  [[nodiscard]] std::size_t handshakes() const noexcept { return handshakes_.size(); }
  [[nodiscard]] std::size_t established() const noexcept {
    return connections_.size() - handshakes_.size();
  }

 private:
  struct Address {
    std::uint32_t handshakes{0};
    std::uint32_t established{0};
  };
  using Addresses = std::unordered_map<std::string, Address>;
  struct Handshake {
    Id id;
    Addresses::value_type* address;
    TimePoint began;
  };
  struct Connection {
    Addresses::value_type* address;
    std::optional<std::list<Handshake>::iterator> handshake;  // none: established
  };

  const ControlLimits limits_;
  Addresses addresses_;              // of live connections; its elements stay where they are
  std::list<Handshake> handshakes_;  // the oldest first
  std::unordered_map<Id, Connection> connections_;
};

}  // namespace kvshard
