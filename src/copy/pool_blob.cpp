#include "copy/pool_blob.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/random.hpp"
#include "base/try.hpp"

namespace kvshard {
namespace {

static_assert(std::endian::native == std::endian::little, "an export holds little-endian numbers");

constexpr std::uint64_t kMagic = 0x3130'6c6f'6f70'766bULL;  // "kvpool01"
constexpr std::size_t kAllocationBytes = 64 + 8;
constexpr std::size_t kBufferBytes = 2 + 8;
constexpr std::size_t kFixedBytes = 8 + 1 + 36 + 4 * 8 + 8 + 16 + 2 + 2;

Error bad(const char* field, const std::string& what) {
  return {ErrorCode::invalid_argument, fmt::format("pool export: {}: {}", field, what)};
}

template <typename T>
void put(std::vector<std::byte>& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
  const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

// Requires that the bytes are there.
template <typename T>
void take(std::span<const std::byte>& from, T& value) {
  std::memcpy(&value, from.data(), sizeof value);
  from = from.subspan(sizeof value);
}

Result<std::uint64_t> namespace_id(const char* path) {
  struct stat found = {};
  if (::stat(path, &found) != 0)
    return Error{ErrorCode::unsupported, fmt::format("{}: errno {}", path, errno)};
  return std::uint64_t{found.st_ino};
}

std::string_view text_of(const std::array<char, 36>& text) noexcept {
  return {text.data(), text.size()};
}

// Bytes from a buffer's start to the end of its last page. validate() has seen that they are countable.
std::uint64_t buffer_bytes(const BufferGroup& group) noexcept {
  const bool by_token = group.order == PageOrder::token_major;
  const std::uint64_t token_stride = group.token_stride != 0 ? group.token_stride
                                     : by_token ? std::uint64_t{group.heads} * group.head_bytes
                                                : group.head_bytes;
  const std::uint64_t head_stride = group.head_stride != 0 ? group.head_stride
                                    : by_token             ? group.head_bytes
                                               : std::uint64_t{group.page_size} * group.head_bytes;
  const std::uint64_t page_stride = group.page_stride != 0 ? group.page_stride : group.page_bytes();
  const auto last = [](std::uint64_t count, std::uint64_t stride) {
    return count == 0 ? 0 : (count - 1) * stride;
  };
  return last(group.page_count, page_stride) + last(group.page_size, token_stride) +
         last(group.heads, head_stride) + group.head_bytes;
}

}  // namespace

Result<ProcessIdentity> this_process() {
  static const std::uint64_t nonce = random_id();
  ProcessIdentity identity;
  std::ifstream file{"/proc/sys/kernel/random/boot_id"};
  if (!file.read(identity.boot_id.data(), identity.boot_id.size()))
    return Error{ErrorCode::unsupported, "/proc/sys/kernel/random/boot_id cannot be read"};
  KVSHARD_TRY(identity.ipc_namespace, namespace_id("/proc/self/ns/ipc"));
  KVSHARD_TRY(identity.pid_namespace, namespace_id("/proc/self/ns/pid"));
  identity.pid = static_cast<std::uint64_t>(::getpid());
  identity.nonce = nonce;
  return identity;
}

Status check_same_host(const ProcessIdentity& exporter, const ProcessIdentity& importer) {
  const auto differs = [](const char* what, auto theirs, auto ours) {
    return Error{ErrorCode::unsupported,
                 fmt::format("the pool is of another {}: {}, here {}", what, theirs, ours)};
  };
  if (exporter.boot_id != importer.boot_id)
    return differs("host, boot id", text_of(exporter.boot_id), text_of(importer.boot_id));
  if (exporter.ipc_namespace != importer.ipc_namespace)
    return differs("IPC namespace", exporter.ipc_namespace, importer.ipc_namespace);
  if (exporter.pid_namespace != importer.pid_namespace)
    return differs("PID namespace", exporter.pid_namespace, importer.pid_namespace);
  return {};
}

Result<std::vector<std::byte>> encode(const PoolBlob& blob) {
  const std::size_t size =
      kFixedBytes + blob.allocations.size() * kAllocationBytes + blob.buffers.size() * kBufferBytes;
  if (size > kMaxPoolExportBytes)
    return Error{
        ErrorCode::unsupported,
        fmt::format("an export of {} buffers in {} allocations takes {} bytes, at most {}",
                    blob.buffers.size(), blob.allocations.size(), size, kMaxPoolExportBytes)};
  std::vector<std::byte> out;
  out.reserve(size);
  put(out, kMagic);
  put(out, blob.memory);
  put(out, blob.process.boot_id);
  put(out, blob.process.ipc_namespace);
  put(out, blob.process.pid_namespace);
  put(out, blob.process.pid);
  put(out, blob.process.nonce);
  put(out, blob.export_id);
  put(out, blob.device_uuid);
  put(out, static_cast<std::uint16_t>(blob.allocations.size()));
  put(out, static_cast<std::uint16_t>(blob.buffers.size()));
  for (const PoolBlob::Allocation& allocation : blob.allocations) {
    put(out, allocation.handle);
    put(out, allocation.bytes);
  }
  for (const PoolBlob::Buffer& buffer : blob.buffers) {
    put(out, buffer.allocation);
    put(out, buffer.offset);
  }
  return out;
}

Result<PoolBlob> decode_pool_blob(std::span<const std::byte> bytes) {
  if (bytes.size() < kFixedBytes || bytes.size() > kMaxPoolExportBytes)
    return bad("size", fmt::format("{} bytes, expected {} to {}", bytes.size(), kFixedBytes,
                                   kMaxPoolExportBytes));
  PoolBlob blob;
  std::uint64_t magic = 0;
  std::uint16_t allocations = 0;
  std::uint16_t buffers = 0;
  take(bytes, magic);
  take(bytes, blob.memory);
  take(bytes, blob.process.boot_id);
  take(bytes, blob.process.ipc_namespace);
  take(bytes, blob.process.pid_namespace);
  take(bytes, blob.process.pid);
  take(bytes, blob.process.nonce);
  take(bytes, blob.export_id);
  take(bytes, blob.device_uuid);
  take(bytes, allocations);
  take(bytes, buffers);
  if (magic != kMagic) return bad("magic", fmt::format("{:#x} instead of {:#x}", magic, kMagic));
  for (const char c : blob.process.boot_id)  // it goes into messages
    if ((c < '0' || c > '9') && (c < 'a' || c > 'f') && c != '-')
      return bad("boot id", fmt::format("holds byte {}", static_cast<int>(c)));
  switch (blob.memory) {
    case MemoryKind::host:
      if (allocations != 0 || buffers != 0)
        return bad("allocations",
                   fmt::format("{} with {} buffers, in host memory", allocations, buffers));
      break;
    case MemoryKind::cuda:
      break;
    default:
      return bad("memory", fmt::format("{} is not a known kind", static_cast<int>(blob.memory)));
  }
  const std::size_t expected = allocations * kAllocationBytes + buffers * kBufferBytes;
  if (bytes.size() != expected)
    return bad("size", fmt::format("{} buffers in {} allocations take {} bytes, {} are left",
                                   buffers, allocations, expected, bytes.size()));
  blob.allocations.resize(allocations);
  for (PoolBlob::Allocation& allocation : blob.allocations) {
    take(bytes, allocation.handle);
    take(bytes, allocation.bytes);
  }
  blob.buffers.resize(buffers);
  for (PoolBlob::Buffer& buffer : blob.buffers) {
    take(bytes, buffer.allocation);
    take(bytes, buffer.offset);
    if (buffer.allocation >= allocations)
      return bad("buffer", fmt::format("in allocation {} of {}", buffer.allocation, allocations));
    if (buffer.offset >= blob.allocations[buffer.allocation].bytes)
      return bad("buffer", fmt::format("at {} of an allocation of {} bytes", buffer.offset,
                                       blob.allocations[buffer.allocation].bytes));
  }
  return blob;
}

Status check_holds(const PoolBlob& blob, const Geometry& geometry) {
  std::size_t next = 0;
  for (const BufferGroup& group : geometry.groups) {
    const std::uint64_t needed = buffer_bytes(group);
    if (group.buffers() > blob.buffers.size() - next)
      return bad("buffers", fmt::format("{}, but group {} ends with number {}", blob.buffers.size(),
                                        group.name, next + group.buffers()));
    for (std::uint32_t i = 0; i < group.buffers(); ++i, ++next) {
      const PoolBlob::Buffer& buffer = blob.buffers[next];
      const std::uint64_t left = blob.allocations[buffer.allocation].bytes - buffer.offset;
      if (needed > left)
        return bad("buffer",
                   fmt::format("{} of group {} takes {} bytes, its allocation has {} left", i,
                               group.name, needed, left));
    }
  }
  if (next != blob.buffers.size())
    return bad("buffers", fmt::format("{}, the geometry has {}", blob.buffers.size(), next));
  return {};
}

}  // namespace kvshard
