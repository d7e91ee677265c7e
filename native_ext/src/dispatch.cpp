#include "dispatch.h"

#include <stdexcept>

namespace zp {

namespace scalar {
extern const KernelTable kTable;
}
namespace baseline {
extern const KernelTable kTable;
}
#if defined(ZP_WITH_AVX2)
namespace avx2 {
extern const KernelTable kTable;
}
#endif
#if defined(ZP_WITH_AVX512)
namespace avx512 {
extern const KernelTable kTable;
}
#endif

namespace {

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables = {&scalar::kTable, &baseline::kTable};
#if defined(ZP_WITH_AVX2) || defined(ZP_WITH_AVX512)
  __builtin_cpu_init();
  [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") &&
                                         __builtin_cpu_supports("fma") &&
                                         __builtin_cpu_supports("f16c");
  [[maybe_unused]] const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#if defined(ZP_WITH_AVX2)
  if (has_avx2) tables.push_back(&avx2::kTable);
#endif
#if defined(ZP_WITH_AVX512)
  if (has_avx512) tables.push_back(&avx512::kTable);
#endif
  return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
  return names;
}

const KernelTable& kernel_table(const std::string& isa) {
  const std::vector<const KernelTable*> tables = available_tables();
  if (isa == "auto") return *tables.back();
  std::string known;
  for (const KernelTable* table : tables) {
    if (isa == table->name) return *table;
    known += known.empty() ? "" : ", ";
    known += table->name;
  }
  throw std::invalid_argument("instruction set '" + isa +
                              "' is not available on this machine; use auto or one of: " + known);
}

}  // namespace zp
