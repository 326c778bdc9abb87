#pragma once

#include <array>
#include <cstddef>
#include <span>

// The few numeric loops of the model. Each result element is computed in one fixed order that depends on
// neither the number of tokens in the call nor where its operands lie, so any split of the work gives the
// same bits. Spans never overlap.

namespace tiny_llm {

/// y[t] = x[t] * w for each token t; x is [tokens][in], w [in][out], y [tokens][out]. A result column does
/// not depend on which others are computed with it.
void matmul(std::span<float> y, std::span<const float> x, std::span<const float> w,
            std::size_t tokens);

/// y += x
void add(std::span<float> y, std::span<const float> x);

/// y[t] = x[t] / rms(x[t]) * gain, for rows of gain.size().
void rms_norm(std::span<float> y, std::span<const float> x, std::span<const float> gain);

// The two loops that run once per head and cached row are inlined there.

inline float dot(std::span<const float> a, std::span<const float> b) {
  // Eight running sums, written out, because the compiler may not reorder one sum into vector lanes.
  constexpr std::size_t kLanes = 8;
  std::array<float, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= a.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (std::size_t lane = 0; i < a.size(); ++i, ++lane) sums[lane] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

/// y += factor * x
inline void add_scaled(std::span<float> y, float factor, std::span<const float> x) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += factor * x[i];
}

void softmax(std::span<float> x);

/// gate = silu(gate) * up
void swiglu(std::span<float> gate, std::span<const float> up);

/// Rotates adjacent pairs (x[2i], x[2i+1]) by the angles whose cosines and sines are given.
void rotate(std::span<float> x, std::span<const float> cos, std::span<const float> sin);

}  // namespace tiny_llm
