#pragma once

#include <memory>
#include <utility>

#include "base/try.hpp"
#include "bench/config.hpp"
#include "kvshard/copy_engine.hpp"
#include "kvshard/transport.hpp"

namespace kvshard::bench {

struct Backends {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<CopyEngine> engine;
};

/// What both kinds of rank make from a configuration. `device` is the rank's GPU, or -1.
inline Result<Backends> make_backends(const PullConfig& config, int device) {
  Backends made;
  KVSHARD_TRY(made.transport,
              make_transport({.kind = TransportOptions::Kind::ucx,
                              .path = config.path == "get"  ? TransferPath::get
                                      : config.path == "am" ? TransferPath::am
                                                            : TransferPath::automatic,
                              .cuda_device = device}));
  CopyEngineOptions copy;
  copy.memory = config.memory_kind();
  copy.cuda_device = device < 0 ? 0 : device;
  KVSHARD_TRY(made.engine, make_copy_engine(copy));
  return made;
}

}  // namespace kvshard::bench
