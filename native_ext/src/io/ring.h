// io_uring through its system calls: just what reading and writing files needs.
#pragma once

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#if defined(IORING_FEAT_RW_CUR_POS)  // of Linux 5.6, as are the operations used here
#define ZP_HAS_URING 1
#endif
#endif

#ifdef ZP_HAS_URING

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zp::io {

struct Completion {
  std::uint64_t tag;
  std::int32_t result;
};

// One submission and one completion queue. Used by one thread at a time.
class Ring {
 public:
  // Throws std::system_error where the kernel refuses.
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // The next free submission, zeroed; the caller never has more of them waiting than `entries`.
  io_uring_sqe& prepare();

  // Hands over what was prepared and waits for `wait` completions. 0 or an errno; what was not
  // handed over stays prepared.
  int enter(unsigned wait);

  // Forgets prepared submissions that the kernel has not taken, and returns how many.
  unsigned retract();

  // Completions that have arrived, at most `capacity`.
  std::size_t take(Completion* completions, std::size_t capacity);

  // 0 or an errno.
  int register_files(const std::vector<int>& descriptors);
  int register_buffers(const std::vector<iovec>& buffers);
  int unregister_files();
  int unregister_buffers();

  // Whether the kernel knows the operation.
  bool supports(unsigned operation) const;

 private:
  struct Mapping {
    void* address = nullptr;
    std::size_t bytes = 0;
  };

  void release();
  Mapping map(std::size_t bytes, std::uint64_t offset) const;
  int control(unsigned operation, const void* argument, unsigned count) const;

  int descriptor_ = -1;
  Mapping submissions_;
  Mapping completions_;  // empty where both queues share one mapping
  Mapping entries_;
  unsigned* sq_head_ = nullptr;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  unsigned prepared_ = 0;  // our tail, published by enter()
};

}  // namespace zp::io

#endif
