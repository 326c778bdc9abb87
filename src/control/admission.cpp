#include "control/admission.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace kvshard {

std::optional<Admission::Id> Admission::arrive(Id id, const std::string& address, TimePoint now) {
  Addresses::value_type& from = *addresses_.try_emplace(address).first;
  std::optional<Id> ends;
  if (from.second.handshakes >= limits_.max_handshakes_per_address) {
    const auto oldest = std::ranges::find(handshakes_, &from, &Handshake::address);
    if (oldest != handshakes_.end()) ends = oldest->id;
  } else if (handshakes_.size() >= limits_.max_handshakes && !handshakes_.empty()) {
    ends = handshakes_.front().id;
  }
  handshakes_.push_back({id, &from, now});
  ++from.second.handshakes;
  connections_.emplace(id, Connection{&from, std::prev(handshakes_.end())});
  return ends;
}

Status Admission::establish(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || !found->second.handshake) return {};
  Addresses::value_type& from = *found->second.address;
  if (established() >= limits_.max_peers) {
    return Error{
        ErrorCode::resource_exhausted,
        fmt::format("{} peers are connected, max_peers is {}", established(), limits_.max_peers)};
  }
  if (from.second.established >= limits_.max_peers_per_address) {
    return Error{ErrorCode::resource_exhausted,
                 fmt::format("{} peers are connected from {}, max_peers_per_address is {}",
                             from.second.established, from.first, limits_.max_peers_per_address)};
  }
  handshakes_.erase(*found->second.handshake);
  found->second.handshake.reset();
  --from.second.handshakes;
  ++from.second.established;
  return {};
}

void Admission::leave(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Addresses::value_type& from = *found->second.address;
  if (found->second.handshake) {
    handshakes_.erase(*found->second.handshake);
    --from.second.handshakes;
  } else {
    --from.second.established;
  }
  connections_.erase(found);
  if (from.second.handshakes + from.second.established == 0)
    addresses_.erase(std::string{from.first});  // a copy: the key goes with its element
}

std::optional<Admission::Id> Admission::overdue(TimePoint now) const {
  if (handshakes_.empty() || now - handshakes_.front().began <= limits_.handshake_timeout)
    return std::nullopt;
  return handshakes_.front().id;
}

}  // namespace kvshard
