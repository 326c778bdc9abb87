#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/try.hpp"
#include "demo/roles.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/transport.hpp"

namespace demo {

/// The backends that both kinds of rank make from their options.
struct Backends {
  std::unique_ptr<kvshard::Transport> transport;
  std::unique_ptr<kvshard::CopyEngine> engine;
};

inline kvshard::Result<Backends> make_backends(const RoleOptions& options) {
  using namespace kvshard;
  const bool cuda = options.memory == "cuda";
  Backends made;
  KVSHARD_TRY(made.transport,
              make_transport({.kind = TransportOptions::Kind::ucx,
                              .path = options.path == "get"  ? TransferPath::get
                                      : options.path == "am" ? TransferPath::am
                                                             : TransferPath::automatic,
                              .cuda_device = cuda ? 0 : -1}));
  CopyEngineOptions copy;
  copy.memory = cuda ? MemoryKind::cuda : MemoryKind::host;
  KVSHARD_TRY(made.engine, make_copy_engine(copy));
  return made;
}

/// Tells the parent why this process cannot go on, and gives its exit code.
inline int give_up(Channel& channel, const std::string& why) {
  (void)channel.send({{"failed", why}});
  return 1;
}

}  // namespace demo
