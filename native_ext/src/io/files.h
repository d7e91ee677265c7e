// What the system says about an open file.
#pragma once

#include <cstdint>
#include <string>

namespace zp::io {

struct DirectAlignment {
  std::uint32_t memory = 0;  // 0: the system does not say
  std::uint32_t offset = 0;
};

// What direct I/O on the file asks of addresses and offsets (statx, Linux 6.1).
DirectAlignment direct_alignment(int descriptor);

// The name of its file system ("ext4", "tmpfs", ...), or its number in hexadecimal.
std::string file_system(int descriptor);

}  // namespace zp::io
