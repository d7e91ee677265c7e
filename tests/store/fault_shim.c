// Preloaded into a test's process: makes chosen reads and writes of the store's files fail or fall short, under both
// engines. pread and pwrite are replaced; io_uring's completions are changed between the kernel and the engine.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

// The plan: operations number first .. first + count - 1 (from 1, reads and writes counted apart) are hit.
static struct {
  int write;       // which of the two
  long first;      // 0: nothing is hit
  long count;
  int error;       // an errno, or 0: the operation falls short
  long short_bytes;
  long seen;
  long hits;
} plan;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  long left;
  int error;
} enter_plan;

void shim_plan(int write, long first, long count, int error, long short_bytes) {
  pthread_mutex_lock(&lock);
  plan.write = write, plan.first = first, plan.count = count, plan.error = error;
  plan.short_bytes = short_bytes, plan.seen = 0, plan.hits = 0;
  pthread_mutex_unlock(&lock);
}

void shim_enter(long count, int error) {
  enter_plan.left = count, enter_plan.error = error;
}

long shim_hits(void) { return plan.hits; }

static int hit(int write) {
  int found = 0;
  pthread_mutex_lock(&lock);
  if (plan.first > 0 && write == plan.write) {
    ++plan.seen;
    found = plan.seen >= plan.first && plan.seen < plan.first + plan.count;
    plan.hits += found;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static int ours(int fd) {
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return strstr(path, "zero-plugin-run-") != NULL;
}

typedef ssize_t (*pread_t)(int, void*, size_t, off_t);
typedef ssize_t (*pwrite_t)(int, const void*, size_t, off_t);

ssize_t pread(int fd, void* data, size_t n, off_t offset) {
  pread_t real = (pread_t)dlsym(RTLD_NEXT, "pread");
  if (ours(fd) && hit(0)) {
    if (plan.error) return errno = plan.error, -1;
    ssize_t moved = real(fd, data, n, offset);
    return moved > plan.short_bytes ? plan.short_bytes : moved;
  }
  return real(fd, data, n, offset);
}
ssize_t pread64(int fd, void* data, size_t n, off_t offset) { return pread(fd, data, n, offset); }

ssize_t pwrite(int fd, const void* data, size_t n, off_t offset) {
  pwrite_t real = (pwrite_t)dlsym(RTLD_NEXT, "pwrite");
  if (ours(fd) && hit(1)) {
    if (plan.error) return errno = plan.error, -1;
    ssize_t moved = real(fd, data, n, offset);
    return moved > plan.short_bytes ? plan.short_bytes : moved;
  }
  return real(fd, data, n, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t n, off_t offset) {
  return pwrite(fd, data, n, offset);
}

// ---------------------------------------------------------------- io_uring

#define MAX_RINGS 16
#define MAX_SLOTS 4096
static struct ring {
  int fd;
  struct io_uring_params params;
  char* queues;
  struct io_uring_sqe* sqes;
  unsigned submitted, seen;
  unsigned char writes[MAX_SLOTS];
} rings[MAX_RINGS];

static struct ring* ring_of(int fd) {
  for (int i = 0; i < MAX_RINGS; ++i)
    if (rings[i].fd == fd && fd > 0) return &rings[i];
  return NULL;
}

typedef void* (*mmap_t)(void*, size_t, int, int, int, off_t);

void* mmap(void* address, size_t n, int protection, int flags, int fd, off_t offset) {
  static mmap_t real;
  if (!real) real = (mmap_t)dlsym(RTLD_NEXT, "mmap");
  void* mapped = real(address, n, protection, flags, fd, offset);
  struct ring* ring = fd > 0 ? ring_of(fd) : NULL;
  if (ring && offset == (off_t)IORING_OFF_SQ_RING) ring->queues = mapped;
  if (ring && offset == (off_t)IORING_OFF_SQES) ring->sqes = mapped;
  return mapped;
}
void* mmap64(void* address, size_t n, int protection, int flags, int fd, off_t offset) {
  return mmap(address, n, protection, flags, fd, offset);
}

typedef long (*syscall_t)(long, ...);

static void note_submissions(struct ring* ring) {
  unsigned mask = *(unsigned*)(ring->queues + ring->params.sq_off.ring_mask);
  unsigned tail = *(unsigned*)(ring->queues + ring->params.sq_off.tail);
  for (; ring->submitted != tail; ++ring->submitted) {
    struct io_uring_sqe* e = &ring->sqes[ring->submitted & mask];
    int write = e->opcode == IORING_OP_WRITE || e->opcode == IORING_OP_WRITE_FIXED;
    if (e->user_data < MAX_SLOTS) ring->writes[e->user_data] = (unsigned char)write;
  }
}

static void change_completions(struct ring* ring) {
  unsigned mask = *(unsigned*)(ring->queues + ring->params.cq_off.ring_mask);
  unsigned head = *(unsigned*)(ring->queues + ring->params.cq_off.head);
  unsigned tail = __atomic_load_n((unsigned*)(ring->queues + ring->params.cq_off.tail), __ATOMIC_ACQUIRE);
  struct io_uring_cqe* cqes = (struct io_uring_cqe*)(ring->queues + ring->params.cq_off.cqes);
  if ((int)(ring->seen - head) < 0) ring->seen = head;
  for (; ring->seen != tail; ++ring->seen) {
    struct io_uring_cqe* e = &cqes[ring->seen & mask];
    if (e->user_data < MAX_SLOTS && e->res >= 0 && hit(ring->writes[e->user_data])) {
      if (plan.error) e->res = -plan.error;
      else if (e->res > plan.short_bytes) e->res = (int)plan.short_bytes;
    }
  }
}

long syscall(long number, ...) {
  static syscall_t real;
  if (!real) real = (syscall_t)dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
  va_end(arguments);
  struct ring* ring = number == __NR_io_uring_enter ? ring_of((int)a[0]) : NULL;
  if (ring) {
    if (enter_plan.left > 0) {
      --enter_plan.left;
      return errno = enter_plan.error, -1;
    }
    note_submissions(ring);
  }
  long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  int error = errno;
  if (ring) change_completions(ring);
  if (number == __NR_io_uring_setup && result > 0) {
    for (int i = 0; i < MAX_RINGS; ++i) {
      // A closed ring's number may be given to a new one.
      if (rings[i].fd != 0 && rings[i].fd != (int)result) continue;
      memset(&rings[i], 0, sizeof rings[i]);
      rings[i].fd = (int)result;
      memcpy(&rings[i].params, (void*)a[1], sizeof rings[i].params);
      break;
    }
  }
  errno = error;
  return result;
}
