#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace zp {

// Instruction sets that are compiled in and that this machine has, best last.
std::vector<std::string> available_isas();

// "auto" gives the best one. Throws std::invalid_argument for a name that is unknown or that this
// machine lacks.
const KernelTable& kernel_table(const std::string& isa);

}  // namespace zp
