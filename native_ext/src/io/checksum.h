// CRC-32C of blocks of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zp::io {

// The checksum (Castagnoli polynomial, reflected, as iSCSI and ext4 use it).
std::uint32_t crc32c(const void* data, std::size_t bytes);

// The same by table, on any processor.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes);

// One sum for each block of `block` bytes; the last may be shorter. A sum is never 0: that marks a
// block nobody wrote.
void block_sums(const char* data, std::size_t bytes, std::size_t block, std::uint32_t* sums);

// The first block whose sum is not the one kept (blocks marked 0 are not looked at), or -1.
std::int64_t first_mismatch(const char* data, std::size_t bytes, std::size_t block,
                            const std::uint32_t* sums);

}  // namespace zp::io
