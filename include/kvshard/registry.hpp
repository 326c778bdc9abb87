#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

/// A geometry as named values, for comparing and for people: describe() in geometry.hpp makes it.
using GeometryFields = std::vector<std::pair<std::string, std::string>>;

/// Limits of what a rank may announce; more is refused by the registry and by whoever asks it.
inline constexpr std::uint32_t kMaxShardSize = 1024;
inline constexpr std::size_t kMaxGroupNameBytes = 128;  ///< letters, digits and . _ - : /
inline constexpr std::size_t kMaxHostBytes = 255;       ///< a name or an IP address
inline constexpr std::size_t kMaxGeometryFields = 512;
inline constexpr std::size_t kMaxGeometryBytes = 64U << 10;  ///< a rank's names and values, UTF-8

/// One prefill rank of a group, as a decode rank reaches it.
struct GroupMember {
  std::uint32_t shard_rank{0};
  std::string host;
  std::uint16_t port{0};
  std::uint64_t incarnation{0};  ///< the process that must answer there; 0: any

  friend bool operator==(const GroupMember&, const GroupMember&) = default;
};

/// A whole prefill group: from wait_for_group(), or written down by hand.
///
/// Shapes:  members hold each shard rank 0 .. members.size() - 1 once, in any order.
struct GroupSpec {
  std::string name;
  std::uint64_t epoch{0};  ///< of the group's launch, the same on all its ranks; 0: any
  std::vector<GroupMember> members;

  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
};

/// Whether a group is whole and its members can be addressed.
///
/// Errors:  invalid_argument naming the field.
KVSHARD_EXPORT Status validate(const GroupSpec& group);

/// What a prefill rank says of itself. One that names no sharding is a group of one.
struct RankAnnouncement {
  std::string group;
  std::uint64_t epoch{0};  ///< not 0
  std::uint32_t shard_rank{0};
  std::uint32_t shard_size{1};
  std::uint64_t incarnation{0};  ///< random for each process, not 0
  std::string host;              ///< of the rank's control socket
  std::uint16_t port{0};
  GeometryFields geometry_fields;  ///< must be equal on all ranks of a group, in any order

  friend bool operator==(const RankAnnouncement&, const RankAnnouncement&) = default;
};

/// Errors: invalid_argument naming the field and its value.
KVSHARD_EXPORT Status validate(const RankAnnouncement& rank);

/// Where prefill ranks announce themselves and decode ranks find them.
///
/// It only introduces: peers authenticate on their own socket. What it answers is checked before
/// use.
///
/// Threads: thread-safe.
/// Errors:  unavailable when the registry cannot be reached or answers nonsense, deadline_exceeded
///          and cancelled (by `stop`): trying again may help. Its refusals: invalid_argument;
///          failed_precondition for a rank that does not fit its group, naming the field and both
///          values; resource_exhausted when the registry is full.
/// Cost:    a few exchanges with the registry per call; waits for `timeout` at most.
/// Source:  docs/registry.md; docs/architecture.md, "Registry".
class KVSHARD_EXPORT Registry {
 public:
  virtual ~Registry() = default;

  /// Lists a rank, in place of an earlier incarnation of it. Returns how long it stays listed.
  virtual Result<std::chrono::milliseconds> announce(const RankAnnouncement& rank,
                                                     std::chrono::milliseconds timeout,
                                                     std::stop_token stop = {}) = 0;
  /// Keeps it listed, or lists it again if the registry forgot it. Refused with failed_precondition
  /// when another incarnation has taken its place.
  virtual Result<std::chrono::milliseconds> renew(const RankAnnouncement& rank,
                                                  std::chrono::milliseconds timeout,
                                                  std::stop_token stop = {}) = 0;
  /// Removes this incarnation of the rank, if it is listed.
  virtual Status withdraw(const RankAnnouncement& rank, std::chrono::milliseconds timeout,
                          std::stop_token stop = {}) = 0;
  /// The ranks listed for a group, of every epoch; each (epoch, shard rank) at most once.
  virtual Result<std::vector<RankAnnouncement>> ranks(std::string_view group,
                                                      std::chrono::milliseconds timeout,
                                                      std::stop_token stop = {}) = 0;
};

/// The registry that an address names, for a program that is told one string:
/// "host:port" or "http://host:port" for make_http_registry(), "etcd://a:2379,b:2379/prefix" for
/// make_etcd_registry(), the prefix with a slash at both ends.
///
/// Waits for nothing, as do the two below. A host name is looked up at each call by the system's
/// resolver, under the resolver's own time limit; where the bound on calls must be exact, give an
/// IP address.
///
/// Errors:  invalid_argument for an address that cannot be one.
KVSHARD_EXPORT Result<std::unique_ptr<Registry>> make_registry(std::string_view address);

/// A registry reached over HTTP at "host:port" or "http://host:port": kvshard-registry, or a
/// RegistryServer.
///
/// Errors:  invalid_argument.
/// Cost:    one exchange per call.
KVSHARD_EXPORT Result<std::unique_ptr<Registry>> make_http_registry(std::string_view address);

struct EtcdOptions {
  std::string key_prefix{"/kvshard/"};    ///< of all keys: letters, digits and . _ - : /
  std::chrono::seconds time_to_live{10};  ///< of a rank that does not renew; etcd may grant more
};

/// An etcd cluster (3.4 or newer, without TLS and users), by its HTTP/JSON gateway. `endpoints` are
/// its members: "host:port,host:port".
///
/// A rank is one key, "<key_prefix><group>@<epoch>/<shard rank>", under a lease of its own. All
/// that is known of it stands there, and none of it here. The member that answered last is asked
/// first; one that does not answer holds a call up for an equal share of the time that is left, and
/// then the next is asked.
///
/// Errors:  invalid_argument.
/// Cost:    announce() three exchanges, renew() and withdraw() two, ranks() one.
KVSHARD_EXPORT Result<std::unique_ptr<Registry>> make_etcd_registry(
    std::string_view endpoints, const EtcdOptions& options = {});

/// Waits until all ranks of one epoch of `group` are listed, asking with back-off and jitter. The
/// newest whole epoch wins.
///
/// Errors:  failed_precondition at once when no epoch is whole and ranks of one contradict each
///          other, naming the field and both values; deadline_exceeded saying which ranks of which
///          epochs are missing, or why the registry did not answer; cancelled.
KVSHARD_EXPORT Result<GroupSpec> wait_for_group(Registry& registry, std::string_view group,
                                                std::chrono::milliseconds timeout,
                                                std::stop_token stop = {});

/// Keeps a prefill rank listed for as long as this object lives.
///
/// Owns:    a thread, which renews. The registry is borrowed and must outlive it.
/// Threads: thread-safe.
/// Cost:    three renewals per time to live. The destructor withdraws the rank, and waits for that
///          up to one second; an entry that could not be withdrawn expires.
class KVSHARD_EXPORT Announcement {
 public:
  /// Returns when the rank is listed. Tries again, with back-off, while the registry cannot be
  /// reached.
  ///
  /// Errors:  a refusal at once; deadline_exceeded with the last failure.
  static Result<std::unique_ptr<Announcement>> start(Registry& registry, RankAnnouncement rank,
                                                     std::chrono::milliseconds timeout);
  ~Announcement();
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;

  /// Ok after a renewal that went well, else why the last did not. After a refusal (another process
  /// took the rank's place) it stays so and no more renewals are tried.
  [[nodiscard]] Status status() const;

 private:
  class Impl;
  explicit Announcement(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct RegistryServerOptions {
  std::string host{"127.0.0.1"};                   ///< an IP address to listen on
  std::uint16_t port{0};                           ///< 0: any free one
  std::chrono::milliseconds time_to_live{10'000};  ///< of a rank that does not renew
};

/// A registry that serves make_http_registry(), people (GET /) and machines (GET /v1/groups,
/// GET /health).
///
/// All state is in memory: after a restart, ranks list themselves again as they renew. No access
/// control: it belongs on the same isolated network as the transfers.
///
/// Owns:    a thread and a listening socket, until the destructor, which does not wait for peers.
/// Threads: thread-safe.
/// Errors:  invalid_argument for the options, unavailable when the address cannot be bound.
class KVSHARD_EXPORT RegistryServer {
 public:
  static Result<std::unique_ptr<RegistryServer>> start(const RegistryServerOptions& options);
  ~RegistryServer();
  RegistryServer(const RegistryServer&) = delete;
  RegistryServer& operator=(const RegistryServer&) = delete;

  /// "host:port" as bound, for make_http_registry().
  [[nodiscard]] std::string address() const;

 private:
  class Impl;
  explicit RegistryServer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
