#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "registry/etcd_json.hpp"

// libFuzzer's entry for etcd's answers. Any bytes must survive base64.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvshard::etcd;
  const std::string_view body{reinterpret_cast<const char*>(data), size};
  if (const auto answer = decode_txn(body)) {
    for (const Entry& entry : answer->entries) (void)decode_entry("/kvshard/", entry);
  }
  (void)decode_grant(body);
  (void)decode_keep_alive(body);
  (void)decode_failure(503, body);
  if (from_base64(to_base64(body)).value_or("") != body) std::abort();
  (void)from_base64(body);
  return 0;
}
