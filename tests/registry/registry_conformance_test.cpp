#include "support/registry_conformance.hpp"

namespace kvshard::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Registries, RegistryConformance, kRegistries, registry_name);
INSTANTIATE_TEST_SUITE_P(Registries, RegistryExpiryConformance, kRegistries, registry_name);

}  // namespace
}  // namespace kvshard::testing
