#include "copy/pool_exports.hpp"

#include <fmt/format.h>

#include <map>
#include <vector>

#include "base/mutex.hpp"
#include "base/random.hpp"
#include "base/try.hpp"

namespace kvshard {
namespace {

struct Table {
  Mutex mutex;
  std::map<std::uint64_t, LocalPool> pools KVSHARD_GUARDED_BY(mutex);
};

Table& table() {
  static auto* const exports =
      new Table;  // never destroyed: an engine's globals may hold an export
  return *exports;
}

class TableExport final : public PoolExport {
 public:
  TableExport(std::uint64_t id, std::vector<std::byte> bytes) noexcept
      : id_{id}, bytes_{std::move(bytes)} {}
  ~TableExport() override {
    const MutexLock lock{table().mutex};
    table().pools.erase(id_);
  }
  TableExport(const TableExport&) = delete;
  TableExport& operator=(const TableExport&) = delete;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept override { return bytes_; }

 private:
  std::uint64_t id_;
  std::vector<std::byte> bytes_;
};

}  // namespace

Result<std::unique_ptr<PoolExport>> publish_export(PoolBlob blob, LocalPool local) {
  KVSHARD_TRY(blob.process, this_process());
  blob.export_id = random_id();
  KVSHARD_TRY(auto bytes, encode(blob));
  auto exported = std::make_unique<TableExport>(blob.export_id, std::move(bytes));
  const MutexLock lock{table().mutex};
  table().pools.emplace(blob.export_id, std::move(local));
  return std::unique_ptr<PoolExport>{std::move(exported)};
}

Result<LocalPool> find_export(std::uint64_t export_id, const Geometry& geometry) {
  const MutexLock lock{table().mutex};
  const auto found = table().pools.find(export_id);
  if (found == table().pools.end())
    return Error{ErrorCode::failed_precondition,
                 fmt::format("pool export {:#x} of this process is gone", export_id)};
  if (found->second.pool.geometry != geometry)
    return Error{ErrorCode::failed_precondition,
                 fmt::format("pool export {:#x} of this process has another geometry than declared",
                             export_id)};
  return found->second;
}

}  // namespace kvshard
