#include "io/files.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

namespace zp::io {

DirectAlignment direct_alignment(int descriptor) {
  DirectAlignment found;
#if defined(__NR_statx)
  // struct statx by its fixed layout: the C library's headers may be older than the two fields.
  constexpr unsigned kDirectMask = 0x2000;
  constexpr std::size_t kMemory = 0x98;
  constexpr std::size_t kOffset = 0x9c;
  alignas(8) unsigned char answer[256] = {};
  if (syscall(__NR_statx, descriptor, "", AT_EMPTY_PATH, kDirectMask, answer) != 0) return found;
  unsigned mask = 0;
  std::memcpy(&mask, answer, sizeof mask);
  if ((mask & kDirectMask) == 0) return found;
  std::memcpy(&found.memory, answer + kMemory, sizeof found.memory);
  std::memcpy(&found.offset, answer + kOffset, sizeof found.offset);
#else
  (void)descriptor;
#endif
  return found;
}

std::string file_system(int descriptor) {
  static constexpr std::pair<unsigned, const char*> kNames[] = {
      {0xEF53, "ext4"},      {0x58465342, "xfs"},    {0x9123683E, "btrfs"},
      {0x01021994, "tmpfs"}, {0x858458F6, "ramfs"},  {0x794C7630, "overlay"},
      {0x6969, "nfs"},       {0x65735546, "fuse"},   {0x2FC12FC1, "zfs"},
      {0xF2F52010, "f2fs"},  {0x0BD00BD0, "lustre"}, {0xFF534D42, "cifs"},
      {0xFE534D42, "smb2"},  {0x01021997, "9p"},     {0x6A656A63, "virtiofs"},
      {0x47504653, "gpfs"},  {0x19830326, "beegfs"}, {0xCA451A4E, "bcachefs"},
  };
  struct statfs answer;
  if (fstatfs(descriptor, &answer) != 0) return "unknown";
  const auto magic = static_cast<unsigned>(answer.f_type);
  for (const auto& [number, name] : kNames) {
    if (number == magic) return name;
  }
  char text[24];
  std::snprintf(text, sizeof text, "0x%x", magic);
  return text;
}

}  // namespace zp::io

#else

#include <sys/mount.h>
#include <sys/param.h>

namespace zp::io {

DirectAlignment direct_alignment(int) { return DirectAlignment{}; }

std::string file_system(int descriptor) {
  struct statfs answer;
  return fstatfs(descriptor, &answer) == 0 ? answer.f_fstypename : "unknown";
}

}  // namespace zp::io

#endif
