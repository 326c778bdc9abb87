#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvshard/export.hpp"
#include "kvshard/result.hpp"

namespace kvshard {

class DecodeRank;
class PrefillRank;

struct PrometheusOptions {
  /// "IP:port" to answer GET /metrics on; port 0: any free one. Empty: no server, text() alone.
  std::string address{"127.0.0.1:0"};
  /// Name and value; put on every sample beside our own.
  std::vector<std::pair<std::string, std::string>> labels{};
};

/// Keeps a rank among what is exported. The rank must outlive it.
///
/// Threads: thread-compatible. The destructor returns when nothing reads the rank any more; it may run
///          before or after the exporter's.
class KVSHARD_EXPORT ExportedRank {
 public:
  ExportedRank(ExportedRank&& other) noexcept;
  ExportedRank& operator=(ExportedRank&& other) noexcept;
  ~ExportedRank();

 private:
  friend class PrometheusExporter;
  class Entry;
  explicit ExportedRank(std::unique_ptr<Entry> entry) noexcept;
  std::unique_ptr<Entry> entry_;
};

/// What the ranks of this process did (metrics.hpp), for Prometheus to scrape.
///
/// A library of its own, kvshard::prometheus, on prometheus-cpp; the ranks know nothing of it. The server
/// has no access control: it belongs on the same isolated network as the transfers. Bytes of label values
/// that are not printable ASCII become '?'.
///
/// Owns:    a thread and a listening socket, until the destructor, which does not wait for peers.
/// Threads: thread-safe.
/// Cost:    a scrape copies the metrics of each rank; nothing runs in between.
/// Source:  docs/metrics.md.
class KVSHARD_EXPORT PrometheusExporter {
 public:
  /// Errors:  invalid_argument for the address or a label; unavailable when the address cannot be bound.
  static Result<std::unique_ptr<PrometheusExporter>> create(const PrometheusOptions& options);
  ~PrometheusExporter();
  PrometheusExporter(const PrometheusExporter&) = delete;
  PrometheusExporter& operator=(const PrometheusExporter&) = delete;

  /// Exports a prefill rank, told apart by the labels `group` and `shard_rank`.
  /// Errors:  invalid_argument when one with the same labels is exported already.
  Result<ExportedRank> add(const PrefillRank& rank);
  /// Exports a decode rank, told apart by the label `decode_rank`, which is `name`.
  /// Errors:  invalid_argument when one of that name is exported already.
  Result<ExportedRank> add(const DecodeRank& rank, const std::string& name);

  /// Of the server, as bound; 0 without one.
  [[nodiscard]] std::uint16_t port() const noexcept;
  /// What a scrape gets, for an engine that has a server of its own: "text/plain; version=0.0.4".
  [[nodiscard]] std::string text() const;

 private:
  class Impl;
  explicit PrometheusExporter(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvshard
