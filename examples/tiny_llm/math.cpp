#include "tiny_llm/math.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace tiny_llm {
namespace {

// One token's outputs [0, kWidth) of a column block of w. The sums stay in registers over all of x.
template <std::size_t kWidth>
void multiply_columns(float* y, std::span<const float> x, const float* w, std::size_t stride) {
  std::array<float, kWidth> sums{};
  for (const float factor : x) {
    for (std::size_t i = 0; i < kWidth; ++i) sums[i] += factor * w[i];
    w += stride;
  }
  std::copy(sums.begin(), sums.end(), y);
}

}  // namespace

void matmul(std::span<float> y, std::span<const float> x, std::span<const float> w,
            std::size_t tokens) {
  if (tokens == 0) return;
  const std::size_t in = x.size() / tokens;
  const std::size_t out = y.size() / tokens;
  // Column blocks outside, tokens inside: a block of w stays in the first-level cache for all tokens.
  std::size_t column = 0;
  const auto sweep = [&]<std::size_t kWidth>() {
    for (; column + kWidth <= out; column += kWidth) {
      for (std::size_t t = 0; t < tokens; ++t) {
        multiply_columns<kWidth>(&y[t * out + column], x.subspan(t * in, in), &w[column], out);
      }
    }
  };
  sweep.operator()<32>();
  sweep.operator()<4>();
  sweep.operator()<1>();
}

void add(std::span<float> y, std::span<const float> x) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += x[i];
}

void rms_norm(std::span<float> y, std::span<const float> x, std::span<const float> gain) {
  constexpr float kEpsilon = 1e-5F;
  const std::size_t width = gain.size();
  for (std::size_t row = 0; row < x.size(); row += width) {
    const auto in = x.subspan(row, width);
    const float scale = 1.0F / std::sqrt(dot(in, in) / static_cast<float>(width) + kEpsilon);
    for (std::size_t i = 0; i < width; ++i) y[row + i] = in[i] * scale * gain[i];
  }
}

void softmax(std::span<float> x) {
  const float top = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& value : x) sum += value = std::exp(value - top);
  const float share = 1.0F / sum;
  for (float& value : x) value *= share;
}

void swiglu(std::span<float> gate, std::span<const float> up) {
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0F + std::exp(-gate[i]));
}

void rotate(std::span<float> x, std::span<const float> cos, std::span<const float> sin) {
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = a * sin[i] + b * cos[i];
  }
}

}  // namespace tiny_llm
