// An NVTX tool that prints the ranges of any domain. nvtx_test loads it as a profiler would be loaded.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

nvtxDomainHandle_t created(const char* name) {
  std::printf("domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&created);  // any address that is not null
}
int pushed(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  std::printf("push %s %llu %s\n", attributes->message.ascii,
              static_cast<unsigned long long>(attributes->payload.ullValue),
              domain != nullptr ? "in its domain" : "in none");
  return 0;
}
int popped(nvtxDomainHandle_t) {
  std::printf("pop\n");
  return 0;
}

template <typename Function>
void set(NvtxFunctionTable table, unsigned int size, NvtxCallbackIdCore2 id, Function function) {
  if (static_cast<unsigned int>(id) < size)
    *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0)
    return 0;
  set(table, size, NVTX_CBID_CORE2_DomainCreateA, created);
  set(table, size, NVTX_CBID_CORE2_DomainRangePushEx, pushed);
  set(table, size, NVTX_CBID_CORE2_DomainRangePop, popped);
  return 1;
}
