#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "kvshard/result.hpp"
#include "tiny_llm/config.hpp"

namespace tiny_llm {

/// One layer's weights; matrices are [in][out]. A model uses those of its kind of attention.
struct Layer {
  std::vector<float> attention_norm;  // [dim]
  std::vector<float> query;           // [dim][heads * head_dim], latent: head_dim + rope_dim
  std::vector<float> key, value;      // grouped: [dim][kv_heads * head_dim]
  std::vector<float> down;            // latent: [dim][latent_dim + rope_dim]
  std::vector<float> latent_norm;     // latent: [latent_dim]
  std::vector<float> up_key;          // latent: [heads][head_dim][latent_dim]
  std::vector<float> up_value;        // latent: [heads][latent_dim][head_dim]
  std::vector<float> output;          // [heads * head_dim][dim]
  std::vector<float> feed_norm;       // [dim]
  std::vector<float> gate, up;        // [dim][hidden]
  std::vector<float> out;             // [hidden][dim]
};

struct Weights {
  std::vector<float> embedding;  // [vocab][dim]
  std::vector<Layer> layers;
  std::vector<float> final_norm;  // [dim]
  std::vector<float> classifier;  // [dim][vocab]
};

struct Checkpoint {
  Config config;
  Weights weights;
  std::string id;  ///< kind of attention and a hash of the file; equal for equal files
};

/// Reads a checkpoint of either format; every header field, and the exact size, are checked first.
///
/// Ours, little-endian: the eight bytes "tinyllm\0"; fourteen uint32: version (1), attention (1 grouped,
/// 2 latent), dim, hidden, layers, heads, kv_heads (1 for latent), head_dim, latent_dim, rope_dim (both 0
/// for grouped), vocab, max_tokens, rope_theta, recall_keys; then float32 weights in the order and shapes of
/// Weights and Layer, without what the kind of attention lacks. The classifier is the transposed embedding
/// and not in the file.
///
/// llama2.c's: seven int32: dim, hidden, layers, heads, kv_heads, vocab (negative: own classifier), max_tokens;
/// then float32 arrays, each over all layers, with matrices [out][in]: embedding, attention_norm, query, key,
/// value, output, feed_norm, gate, out, up, final_norm, two unused tables of
/// max_tokens * head_dim / 2 each, and the classifier if it is its own.
///
/// Errors: invalid_argument naming the field or the two sizes; unavailable when the file cannot be read.
kvshard::Result<Checkpoint> load_checkpoint(const std::filesystem::path& path);
kvshard::Result<Checkpoint> parse_checkpoint(std::span<const std::byte> bytes);

}  // namespace tiny_llm
