#pragma once

#include "kvshard/clock.hpp"  // ManualClock: engines' tests use it too
