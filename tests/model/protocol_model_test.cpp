#include <gtest/gtest.h>

#include "model/protocol_model.hpp"

namespace kvshard::model {
namespace {

TEST(ProtocolModelTest, SuccessImpliesValidBytesInEveryInterleaving) {
  Explorer explorer{{}};
  const auto broken = explorer.run();
  EXPECT_FALSE(broken) << *broken;
  EXPECT_GT(explorer.states(), 10'000U);
  RecordProperty("states", static_cast<int>(explorer.states()));
}

// Every guard is needed: without it some interleaving goes wrong.
struct Removal {
  const char* name;
  bool Guards::*guard;
  const char* law;
};
void PrintTo(const Removal& removal, std::ostream* out) {
  *out << removal.name;
}
class GuardTest : public ::testing::TestWithParam<Removal> {};

TEST_P(GuardTest, IsNeeded) {
  Guards guards;
  guards.*GetParam().guard = false;
  const auto broken = Explorer{guards}.run();
  ASSERT_TRUE(broken) << "nothing went wrong without " << GetParam().name;
  EXPECT_EQ(broken->rfind(GetParam().law, 0), 0U) << *broken;
}

INSTANTIATE_TEST_SUITE_P(
    Without, GuardTest,
    ::testing::Values(
        Removal{"commit", &Guards::commit_asks_owner, "success with wrong bytes"},
        Removal{"poisoning", &Guards::poison_before_reuse, "success with wrong bytes"},
        Removal{"late_release", &Guards::release_after_read, "success with wrong bytes"},
        Removal{"pins", &Guards::pages_stay_pinned, "success with wrong bytes"},
        Removal{"gather_hold", &Guards::gather_keeps_slot, "success with wrong bytes"},
        Removal{"quarantine", &Guards::quarantine, "success with wrong bytes"},
        Removal{"sessions", &Guards::session_bound, "success with wrong bytes"},
        Removal{"monotone_status", &Guards::monotone, "two terminal events"}),
    [](const auto& removal) { return std::string{removal.param.name}; });

// Stamps find damage early; it is COMMIT that decides.
TEST(ProtocolModelTest, StampsAreNotWhatSuccessRestsOn) {
  Guards guards;
  guards.stamps = false;
  const auto broken = Explorer{guards}.run();
  EXPECT_FALSE(broken) << *broken;
}

}  // namespace
}  // namespace kvshard::model
