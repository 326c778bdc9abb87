#include "kvshard/registry.hpp"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "c_api/boundary.hpp"
#include "c_api/pools.hpp"
#include "c_api/prefill_handle.hpp"

using namespace kvshard;
using namespace kvshard::c_api;

struct kvshard_registry {
  std::shared_ptr<Registry> registry;
};
struct kvshard_announcement {
  std::shared_ptr<Registry> registry;  // outlives the announcement, which borrows it
  std::unique_ptr<Announcement> announcement;
};
struct kvshard_registry_server {
  std::unique_ptr<RegistryServer> server;
  std::string address;
};

int32_t kvshard_registry_create(const char* address, kvshard_registry** registry,
                                kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(address, "address"));
    KVSHARD_TRY(required(registry, "registry"));
    KVSHARD_TRY(auto made, make_registry(address));
    *registry = new kvshard_registry{std::move(made)};
    return {};
  });
}

void kvshard_registry_destroy(kvshard_registry* registry) {
  delete registry;
}

int32_t kvshard_announce(kvshard_registry* registry, const kvshard_prefill_rank* rank,
                         uint32_t timeout_ms, kvshard_announcement** announcement,
                         kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(registry, "registry"));
    KVSHARD_TRY(required(rank, "rank"));
    KVSHARD_TRY(required(announcement, "announcement"));
    KVSHARD_TRY(auto made, Announcement::start(*registry->registry, rank->rank->announcement(),
                                               std::chrono::milliseconds{timeout_ms}));
    *announcement = new kvshard_announcement{registry->registry, std::move(made)};
    return {};
  });
}

int32_t kvshard_announcement_status(const kvshard_announcement* announcement,
                                    kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(announcement, "announcement"));
    return announcement->announcement->status();
  });
}

void kvshard_announcement_destroy(kvshard_announcement* announcement) {
  delete announcement;
}

int32_t kvshard_wait_for_group(kvshard_registry* registry, uint32_t timeout_ms,
                               kvshard_group_spec* group, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(registry, "registry"));
    KVSHARD_TRY(auto to, to_fill(group, "kvshard_group_spec"));
    KVSHARD_TRY(required(to.name, "name"));
    KVSHARD_TRY(required_array(to.members, to.member_capacity, "members"));
    std::uint32_t stride = 0;
    if (to.member_capacity > 0) {
      KVSHARD_TRY(const auto member, to_fill(to.members, "kvshard_group_member"));
      stride = member.size;
    }
    KVSHARD_TRY(const GroupSpec found, wait_for_group(*registry->registry, to.name,
                                                      std::chrono::milliseconds{timeout_ms}));
    to.epoch = found.epoch;
    to.member_count = static_cast<std::uint32_t>(found.members.size());
    write(to, group, to.size);
    if (to.member_count > to.member_capacity) {
      return Error{ErrorCode::resource_exhausted,
                   fmt::format("group {} has {} members, member_capacity is {}", found.name,
                               to.member_count, to.member_capacity)};
    }
    for (std::uint32_t i = 0; i < to.member_count; ++i)
      write(from_member(found.members[i]), element(to.members, stride, i), stride);
    return {};
  });
}

int32_t kvshard_registry_server_start(const char* host, uint32_t port,
                                      kvshard_registry_server** server, kvshard_error* error) {
  return guarded(error, [&]() -> Status {
    KVSHARD_TRY(required(server, "server"));
    RegistryServerOptions options;
    options.host = text_or(host, options.host.c_str());
    KVSHARD_TRY(options.port, to_port(port));
    KVSHARD_TRY(auto made, RegistryServer::start(options));
    std::string address = made->address();
    *server = new kvshard_registry_server{std::move(made), std::move(address)};
    return {};
  });
}

const char* kvshard_registry_server_address(const kvshard_registry_server* server) {
  return server != nullptr ? server->address.c_str() : nullptr;
}

void kvshard_registry_server_destroy(kvshard_registry_server* server) {
  delete server;
}
