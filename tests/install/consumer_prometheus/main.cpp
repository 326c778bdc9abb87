#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/decode_rank.hpp"
#include "kvshard/prometheus.hpp"

namespace {

template <typename T>
T must(kvshard::Result<T> result) {
  if (result) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.error().message.c_str());
  std::exit(1);
}

}  // namespace

// Exports a decode rank. docs/metrics.md shows how.
int main() {
  constexpr std::size_t kPages = 9;
  std::vector<std::byte> keys(kPages * 1024), values(kPages * 1024);
  kvshard::DecodeOptions options;
  options.pool.geometry.model_id = "m";
  options.pool.geometry.groups = {{.name = "kv",
                                   .layers = 1,
                                   .buffers_per_layer = 2,
                                   .element_type = kvshard::ElementType::bf16,
                                   .heads = 1,
                                   .head_bytes = 64,
                                   .page_size = 16,
                                   .page_count = kPages}};
  options.pool.buffers = {{keys.data(), values.data()}};
  const auto decode = must(kvshard::DecodeRank::create(
      std::move(options),
      must(kvshard::make_transport({.kind = kvshard::TransportOptions::Kind::loopback})),
      must(kvshard::make_copy_engine({}))));

  const auto exporter = must(kvshard::PrometheusExporter::create(
      {.address = "127.0.0.1:0", .labels = {{"site", "lab"}}}));  // port 0: any free one
  const auto exported = must(exporter->add(*decode, "0"));  // for as long as this handle lives
  std::printf("scraped at http://127.0.0.1:%d/metrics\n", exporter->port());

  if (exporter->text().find(
          "kvshard_decode_pulls_total{site=\"lab\",decode_rank=\"0\",code=\"ok\"} 0\n") ==
      std::string::npos)
    return 2;
  std::puts("consumer_prometheus: ok");
  return 0;
}
