#include <gtest/gtest.h>

#include "support/transport_conformance.hpp"

namespace kvshard::testing {
namespace {

constexpr TransportOptions options_for(TransferPath path) {
  return {.kind = TransportOptions::Kind::ucx, .path = path};
}

INSTANTIATE_TEST_SUITE_P(Ucx, TransportConformance,
                         ::testing::Values(options_for(TransferPath::get),
                                           options_for(TransferPath::am),
                                           options_for(TransferPath::automatic)),
                         [](const auto& test) { return std::string{to_string(test.param.path)}; });

}  // namespace
}  // namespace kvshard::testing
