#include "io/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace zp::io {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0x82F63B78u : 0u);
    tables[0][byte] = value;
  }
  for (std::size_t step = 1; step < 8; ++step) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[step - 1][byte];
      tables[step][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) {
  return crc >> 8 ^ kTables[0][(crc ^ byte) & 0xFF];
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const unsigned char* data,
                                                             std::size_t bytes) {
  std::uint64_t crc = 0xFFFFFFFFu;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  auto rest = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; ++data, --bytes) rest = _mm_crc32_u8(rest, *data);
  return ~rest;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* memory, std::size_t bytes) {
  const auto* data = static_cast<const unsigned char*>(memory);
  std::uint32_t crc = 0xFFFFFFFFu;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    crc ^= static_cast<std::uint32_t>(data[0]) | static_cast<std::uint32_t>(data[1]) << 8 |
           static_cast<std::uint32_t>(data[2]) << 16 | static_cast<std::uint32_t>(data[3]) << 24;
    crc = kTables[7][crc & 0xFF] ^ kTables[6][crc >> 8 & 0xFF] ^ kTables[5][crc >> 16 & 0xFF] ^
          kTables[4][crc >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
          kTables[0][data[7]];
  }
  for (; bytes > 0; ++data, --bytes) crc = add_byte(crc, *data);
  return ~crc;
}

std::uint32_t crc32c(const void* memory, std::size_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    return crc32c_sse42(static_cast<const unsigned char*>(memory), bytes);
  }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
  const auto* data = static_cast<const unsigned char*>(memory);
  std::uint32_t crc = 0xFFFFFFFFu;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; ++data, --bytes) crc = __crc32cb(crc, *data);
  return ~crc;
#endif
  return crc32c_portable(memory, bytes);
}

void block_sums(const char* data, std::size_t bytes, std::size_t block, std::uint32_t* sums) {
  for (std::size_t start = 0; start < bytes; start += block, ++sums) {
    *sums = std::max(crc32c(data + start, std::min(block, bytes - start)), std::uint32_t{1});
  }
}

std::int64_t first_mismatch(const char* data, std::size_t bytes, std::size_t block,
                            const std::uint32_t* sums) {
  std::int64_t place = 0;
  for (std::size_t start = 0; start < bytes; start += block, ++place) {
    const std::uint32_t kept = sums[place];
    if (kept == 0) continue;
    const std::uint32_t sum = crc32c(data + start, std::min(block, bytes - start));
    if (std::max(sum, std::uint32_t{1}) != kept) return place;
  }
  return -1;
}

}  // namespace zp::io
