#pragma once

#include <cstdint>

#include <nvtx3/nvToolsExt.h>

namespace kvshard {

/// A range in the NVTX domain "kvshard" for as long as it lives, so that a profiler shows what the work enqueued
/// meanwhile was for. Without a profiler it is a look at a null pointer.
///
/// Threads: ranges of one thread nest.
class NvtxRange {
 public:
  /// `name` is borrowed. `bytes` shows as the range's payload.
  NvtxRange(const char* name, std::uint64_t bytes) noexcept {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = bytes;
    nvtxDomainRangePushEx(domain(), &attributes);
  }
  ~NvtxRange() { nvtxDomainRangePop(domain()); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;

 private:
  static nvtxDomainHandle_t domain() noexcept {
    static nvtxDomainHandle_t const made = nvtxDomainCreateA("kvshard");
    return made;
  }
};

}  // namespace kvshard
