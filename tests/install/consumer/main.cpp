#include <chrono>
#include <cstdio>

#include "kvshard/page_layout.hpp"
#include "kvshard/registry.hpp"
#include "kvshard/transport.hpp"

// Touches a pure part, a part with threads and sockets, and the transports, so that all of them link.
int main() {
  using namespace std::chrono_literals;
  const auto layout = kvshard::PageLayout::create(4, 64);
  if (!layout) return 1;

  const auto server = kvshard::RegistryServer::start({});
  if (!server) return 2;
  const auto registry = kvshard::make_http_registry(server.value()->address());
  if (!registry) return 3;
  const kvshard::RankAnnouncement rank{.group = "g",
                                       .epoch = 1,
                                       .incarnation = 1,
                                       .host = "127.0.0.1",
                                       .port = 1,
                                       .geometry_fields = {}};
  if (!registry.value()->announce(rank, 10s)) return 4;
  const auto group = kvshard::wait_for_group(*registry.value(), "g", 10s);
  if (!group || group.value().members.size() != 1) return 5;

  const auto transport =
      kvshard::make_transport({.kind = kvshard::TransportOptions::Kind::loopback});
  if (!transport) return 6;
  std::puts("consumer: ok");
  return 0;
}
