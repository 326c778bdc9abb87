#include "tiny_llm/checkpoint.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

namespace tiny_llm {
namespace {

using kvshard::Error;
using kvshard::ErrorCode;
using kvshard::Result;
using kvshard::Status;

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

constexpr std::string_view kMagic{"tinyllm", 8};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderWords = 14;
constexpr std::size_t kLlama2HeaderWords = 7;
constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{1} << 30;

Error refuse(std::string_view format, std::string why) {
  return Error{ErrorCode::invalid_argument, std::string{format} + " checkpoint: " + std::move(why)};
}

template <std::size_t kCount>
std::array<std::uint32_t, kCount> words(std::span<const std::byte> bytes) {
  std::array<std::uint32_t, kCount> result;
  std::memcpy(result.data(), bytes.data(), sizeof(result));
  return result;
}

struct Bound {
  std::string_view name;
  std::uint32_t value;
  std::uint32_t low;
  std::uint32_t high;
};

// The bounds also keep every size below 2^48, so that none of the products further down can wrap.
Status check(const Config& c, std::string_view format) {
  const bool latent = c.attention == Attention::latent;
  const Bound bounds[] = {
      {"dim", c.dim, 1, 8192},
      {"hidden", c.hidden, 1, 32768},
      {"layers", c.layers, 1, 128},
      {"heads", c.heads, 1, 128},
      {"kv_heads", c.kv_heads, 1, latent ? 1 : c.heads},
      {"head_dim", c.head_dim, 1, 512},
      {"latent_dim", c.latent_dim, latent ? 1U : 0U, latent ? 4096U : 0U},
      {"rope_dim", c.rope_dim, latent ? 2U : 0U, latent ? 512U : 0U},
      {"vocab", c.vocab, 1, 1U << 20},
      {"max_tokens", c.max_tokens, 1, 1U << 20},
      {"rope_theta", c.rope_theta, 1, 1U << 30},
      {"recall_keys", c.recall_keys, 0, 1U << 19},
  };
  for (const auto& [name, value, low, high] : bounds) {
    if (value < low || value > high) {
      return refuse(format, std::string{name} + " is " + std::to_string(value) + ", not in [" +
                                std::to_string(low) + ", " + std::to_string(high) + "]");
    }
  }
  if (c.heads % c.kv_heads != 0) {
    return refuse(format, "kv_heads " + std::to_string(c.kv_heads) + " does not divide heads " +
                              std::to_string(c.heads));
  }
  const std::uint32_t rotated = latent ? c.rope_dim : c.head_dim;
  if (rotated % 2 != 0)
    return refuse(format, "rotated width " + std::to_string(rotated) + " is odd");
  if (c.recall_keys != 0 && c.vocab != 2 * c.recall_keys + 1) {
    return refuse(format, "recall_keys " + std::to_string(c.recall_keys) + " does not fit vocab " +
                              std::to_string(c.vocab));
  }
  return {};
}

// Calls visit(array, rows, columns) for each array of a layer in file order.
template <typename Visit>
void for_each_array(const Config& c, Layer& layer, Visit&& visit) {
  const std::size_t query_width = c.head_dim + c.rope_dim;  // rope_dim is 0 for grouped
  visit(layer.attention_norm, 1, c.dim);
  visit(layer.query, c.dim, c.heads * query_width);
  if (c.attention == Attention::grouped) {
    visit(layer.key, c.dim, std::size_t{c.kv_heads} * c.head_dim);
    visit(layer.value, c.dim, std::size_t{c.kv_heads} * c.head_dim);
  } else {
    visit(layer.down, c.dim, std::size_t{c.latent_dim} + c.rope_dim);
    visit(layer.latent_norm, 1, c.latent_dim);
    visit(layer.up_key, std::size_t{c.heads} * c.head_dim, c.latent_dim);
    visit(layer.up_value, std::size_t{c.heads} * c.latent_dim, c.head_dim);
  }
  visit(layer.output, std::size_t{c.heads} * c.head_dim, c.dim);
  visit(layer.feed_norm, 1, c.dim);
  visit(layer.gate, c.dim, c.hidden);
  visit(layer.up, c.dim, c.hidden);
  visit(layer.out, c.hidden, c.dim);
}

// Floats of the whole file, from the config alone, before anything is allocated.
std::size_t count_weights(const Config& c) {
  std::size_t per_layer = 0;
  Layer unused;
  for_each_array(c, unused, [&](auto&, std::size_t rows, std::size_t columns) {
    per_layer += rows * columns;
  });
  return std::size_t{c.vocab} * c.dim + c.layers * per_layer + c.dim;
}

Status check_size(std::span<const std::byte> bytes, std::size_t header_bytes, std::size_t weights,
                  std::string_view format) {
  const std::size_t expected = header_bytes + weights * sizeof(float);
  if (bytes.size() == expected) return {};
  return refuse(format, std::to_string(bytes.size()) + " bytes where its header asks for " +
                            std::to_string(expected));
}

// Takes arrays off the front of a span whose size was checked.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_{bytes} {}

  std::vector<float> take(std::size_t count) {
    std::vector<float> result(count);
    std::memcpy(result.data(), bytes_.data(), count * sizeof(float));
    bytes_ = bytes_.subspan(count * sizeof(float));
    return result;
  }
  void skip(std::size_t count) { bytes_ = bytes_.subspan(count * sizeof(float)); }

 private:
  std::span<const std::byte> bytes_;
};

std::vector<float> transpose(const std::vector<float>& matrix, std::size_t rows,
                             std::size_t columns) {
  std::vector<float> result(matrix.size());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) result[c * rows + r] = matrix[r * columns + c];
  }
  return result;
}

Result<Checkpoint> parse_ours(std::span<const std::byte> bytes) {
  constexpr std::string_view kFormat = "tinyllm";
  constexpr std::size_t kHeaderBytes = kMagic.size() + kHeaderWords * sizeof(std::uint32_t);
  if (bytes.size() < kHeaderBytes) {
    return refuse(kFormat, std::to_string(bytes.size()) + " bytes, the header alone has " +
                               std::to_string(kHeaderBytes));
  }
  const auto h = words<kHeaderWords>(bytes.subspan(kMagic.size()));
  if (h[0] != kVersion) {
    return refuse(kFormat, "version " + std::to_string(h[0]) + ", this reader knows " +
                               std::to_string(kVersion));
  }
  if (h[1] != 1 && h[1] != 2)
    return refuse(kFormat, "attention is " + std::to_string(h[1]) + ", not 1 or 2");
  Checkpoint result;
  const Config& c = result.config = Config{.attention = static_cast<Attention>(h[1]),
                                           .dim = h[2],
                                           .hidden = h[3],
                                           .layers = h[4],
                                           .heads = h[5],
                                           .kv_heads = h[6],
                                           .head_dim = h[7],
                                           .latent_dim = h[8],
                                           .rope_dim = h[9],
                                           .vocab = h[10],
                                           .max_tokens = h[11],
                                           .rope_theta = h[12],
                                           .recall_keys = h[13]};
  if (Status status = check(c, kFormat); !status) return status.error();
  if (Status status = check_size(bytes, kHeaderBytes, count_weights(c), kFormat); !status)
    return status.error();

  Reader reader{bytes.subspan(kHeaderBytes)};
  Weights& w = result.weights;
  w.embedding = reader.take(std::size_t{c.vocab} * c.dim);
  w.layers.resize(c.layers);
  for (Layer& layer : w.layers) {
    for_each_array(c, layer, [&](auto& array, std::size_t rows, std::size_t columns) {
      array = reader.take(rows * columns);
    });
  }
  w.final_norm = reader.take(c.dim);
  w.classifier = transpose(w.embedding, c.vocab, c.dim);
  return result;
}

Result<Checkpoint> parse_llama2(std::span<const std::byte> bytes) {
  constexpr std::string_view kFormat = "llama2.c";
  constexpr std::size_t kHeaderBytes = kLlama2HeaderWords * sizeof(std::uint32_t);
  if (bytes.size() < kHeaderBytes) {
    return refuse(kFormat, std::to_string(bytes.size()) + " bytes, the header alone has " +
                               std::to_string(kHeaderBytes));
  }
  const auto h = words<kLlama2HeaderWords>(bytes);
  const bool own_classifier = static_cast<std::int32_t>(h[5]) < 0;
  Checkpoint result;
  Config& c = result.config;
  c = Config{.attention = Attention::grouped,
             .dim = h[0],
             .hidden = h[1],
             .layers = h[2],
             .heads = h[3],
             .kv_heads = h[4],
             .head_dim = h[3] == 0 ? 0 : h[0] / h[3],
             .vocab = own_classifier ? 0U - h[5] : h[5],
             .max_tokens = h[6]};
  if (Status status = check(c, kFormat); !status) return status.error();
  if (c.dim % c.heads != 0) {
    return refuse(kFormat, "heads " + std::to_string(c.heads) + " does not divide dim " +
                               std::to_string(c.dim));
  }
  const std::size_t embedding = std::size_t{c.vocab} * c.dim;
  const std::size_t tables = std::size_t{c.max_tokens} * c.head_dim;
  const std::size_t floats = count_weights(c) + tables + (own_classifier ? embedding : 0);
  if (Status status = check_size(bytes, kHeaderBytes, floats, kFormat); !status)
    return status.error();

  Reader reader{bytes.subspan(kHeaderBytes)};
  Weights& w = result.weights;
  w.layers.resize(c.layers);
  const auto vectors = [&](std::vector<float> Layer::*array) {
    for (Layer& layer : w.layers) layer.*array = reader.take(c.dim);
  };
  const auto matrices = [&](std::vector<float> Layer::*array, std::size_t in, std::size_t out) {
    for (Layer& layer : w.layers) layer.*array = transpose(reader.take(in * out), out, in);
  };
  const std::size_t kv_width = std::size_t{c.kv_heads} * c.head_dim;
  w.embedding = reader.take(embedding);
  vectors(&Layer::attention_norm);
  matrices(&Layer::query, c.dim, c.dim);
  matrices(&Layer::key, c.dim, kv_width);
  matrices(&Layer::value, c.dim, kv_width);
  matrices(&Layer::output, c.dim, c.dim);
  vectors(&Layer::feed_norm);
  matrices(&Layer::gate, c.dim, c.hidden);
  matrices(&Layer::out, c.hidden, c.dim);
  matrices(&Layer::up, c.dim, c.hidden);
  w.final_norm = reader.take(c.dim);
  reader.skip(tables);
  w.classifier = transpose(own_classifier ? reader.take(embedding) : w.embedding, c.vocab, c.dim);
  return result;
}

// FNV-1a: tells files apart, does not authenticate them.
std::uint64_t hash(std::span<const std::byte> bytes) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const std::byte b : bytes)
    value = (value ^ std::to_integer<std::uint64_t>(b)) * 0x100000001b3;
  return value;
}

std::string hex(std::uint64_t value) {
  std::string digits(16, '0');
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, value >>= 4) {
    *digit = "0123456789abcdef"[value & 15];
  }
  return digits;
}

}  // namespace

Result<Checkpoint> parse_checkpoint(std::span<const std::byte> bytes) {
  const bool ours =
      bytes.size() >= kMagic.size() && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
  auto result = ours ? parse_ours(bytes) : parse_llama2(bytes);
  if (!result) return result;
  result->id =
      result->config.attention == Attention::grouped ? "tiny_llm/grouped/" : "tiny_llm/latent/";
  result->id += hex(hash(bytes));
  return result;
}

Result<Checkpoint> load_checkpoint(const std::filesystem::path& path) {
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  if (failed) return Error{ErrorCode::unavailable, path.string() + ": " + failed.message()};
  if (size > kMaxFileBytes) {
    return Error{ErrorCode::invalid_argument, path.string() + ": " + std::to_string(size) +
                                                  " bytes exceed " + std::to_string(kMaxFileBytes)};
  }
  std::vector<char> bytes(size);
  std::ifstream file{path, std::ios::binary};
  if (!file.read(bytes.data(), static_cast<std::streamsize>(size))) {
    return Error{ErrorCode::unavailable,
                 path.string() + ": cannot read " + std::to_string(size) + " bytes"};
  }
  auto result = parse_checkpoint(std::as_bytes(std::span{bytes}));
  if (!result) result.error().message = path.string() + ": " + result.error().message;
  return result;
}

}  // namespace tiny_llm
