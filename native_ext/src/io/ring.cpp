#include "io/ring.h"

#ifdef ZP_HAS_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif

namespace zp::io {
namespace {

unsigned* word(void* base, std::uint32_t offset) {
  return reinterpret_cast<unsigned*>(static_cast<char*>(base) + offset);  // NOLINT
}

unsigned load(const unsigned* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }

void store(unsigned* address, unsigned value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

Ring::Ring(unsigned entries) {
  io_uring_params params{};
  // Completions need not interrupt the thread: it waits for them anyway. Kernels before 5.19 do not
  // know the flag.
  params.flags = IORING_SETUP_COOP_TASKRUN;
  long descriptor = syscall(__NR_io_uring_setup, entries, &params);
  if (descriptor < 0 && errno == EINVAL) {
    params = io_uring_params{};
    descriptor = syscall(__NR_io_uring_setup, entries, &params);
  }
  if (descriptor < 0) fail(errno, "io_uring_setup");
  descriptor_ = static_cast<int>(descriptor);
  try {
    std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    const bool shared = (params.features & IORING_FEAT_SINGLE_MMAP) != 0;
    if (shared) sq_bytes = std::max(sq_bytes, cq_bytes);
    submissions_ = map(sq_bytes, IORING_OFF_SQ_RING);
    if (!shared) completions_ = map(cq_bytes, IORING_OFF_CQ_RING);
    entries_ = map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  } catch (...) {
    release();
    throw;
  }
  void* const sq = submissions_.address;
  void* const cq = completions_.address != nullptr ? completions_.address : sq;
  sq_head_ = word(sq, params.sq_off.head);
  sq_tail_ = word(sq, params.sq_off.tail);
  sq_mask_ = *word(sq, params.sq_off.ring_mask);
  cq_head_ = word(cq, params.cq_off.head);
  cq_tail_ = word(cq, params.cq_off.tail);
  cq_mask_ = *word(cq, params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(cq) + params.cq_off.cqes);  // NOLINT
  unsigned* const array = word(sq, params.sq_off.array);
  for (unsigned slot = 0; slot < params.sq_entries; ++slot) array[slot] = slot;
  prepared_ = *sq_tail_;
}

Ring::~Ring() { release(); }

void Ring::release() {
  for (Mapping* mapping : {&entries_, &completions_, &submissions_}) {
    if (mapping->address != nullptr) munmap(mapping->address, mapping->bytes);
    *mapping = Mapping{};
  }
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Ring::Mapping Ring::map(std::size_t bytes, std::uint64_t offset) const {
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                             descriptor_, static_cast<off_t>(offset));
  if (address == MAP_FAILED) fail(errno, "mmap of an io_uring queue");
  return Mapping{address, bytes};
}

io_uring_sqe& Ring::prepare() {
  auto* const entries = static_cast<io_uring_sqe*>(entries_.address);
  io_uring_sqe& entry = entries[prepared_ & sq_mask_];
  std::memset(&entry, 0, sizeof entry);
  ++prepared_;
  return entry;
}

int Ring::enter(unsigned wait) {
  store(sq_tail_, prepared_);
  const unsigned waiting = prepared_ - load(sq_head_);
  const unsigned flags = wait > 0 ? IORING_ENTER_GETEVENTS : 0U;
  const long taken =
      syscall(__NR_io_uring_enter, descriptor_, waiting, wait, flags, nullptr, std::size_t{0});
  return taken < 0 ? errno : 0;
}

unsigned Ring::retract() {
  const unsigned head = load(sq_head_);
  const unsigned count = prepared_ - head;
  prepared_ = head;
  store(sq_tail_, head);
  return count;
}

std::size_t Ring::take(Completion* completions, std::size_t capacity) {
  unsigned head = *cq_head_;
  const unsigned tail = load(cq_tail_);
  std::size_t count = 0;
  for (; head != tail && count < capacity; ++head, ++count) {
    const io_uring_cqe& entry = cqes_[head & cq_mask_];
    completions[count] = Completion{entry.user_data, entry.res};
  }
  store(cq_head_, head);
  return count;
}

int Ring::control(unsigned operation, const void* argument, unsigned count) const {
  const long done = syscall(__NR_io_uring_register, descriptor_, operation, argument, count);
  return done < 0 ? errno : 0;
}

int Ring::register_files(const std::vector<int>& descriptors) {
  return control(IORING_REGISTER_FILES, descriptors.data(),
                 static_cast<unsigned>(descriptors.size()));
}

int Ring::register_buffers(const std::vector<iovec>& buffers) {
  return control(IORING_REGISTER_BUFFERS, buffers.data(), static_cast<unsigned>(buffers.size()));
}

int Ring::unregister_files() { return control(IORING_UNREGISTER_FILES, nullptr, 0); }

int Ring::unregister_buffers() { return control(IORING_UNREGISTER_BUFFERS, nullptr, 0); }

bool Ring::supports(unsigned operation) const {
  constexpr unsigned kOperations = 256;
  // The probe ends in an array that C++ has no type for.
  std::vector<std::uint64_t> memory(
      (sizeof(io_uring_probe) + kOperations * sizeof(io_uring_probe_op)) / 8 + 1);
  if (control(IORING_REGISTER_PROBE, memory.data(), kOperations) != 0) return false;
  io_uring_probe probe;
  std::memcpy(&probe, memory.data(), sizeof probe);
  if (operation > probe.last_op) return false;
  io_uring_probe_op answer;
  std::memcpy(&answer,
              reinterpret_cast<const char*>(memory.data()) + sizeof(io_uring_probe) +  // NOLINT
                  operation * sizeof answer,
              sizeof answer);
  return (answer.flags & IO_URING_OP_SUPPORTED) != 0;
}

}  // namespace zp::io

#endif
