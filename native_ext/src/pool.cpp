#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zp {
namespace {

// Kernels run with round-to-nearest and denormals kept, whatever torch.set_flush_denormal or the
// caller chose for its own thread; the caller's mode is put back afterwards.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#endif

 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

}  // namespace

Pool::Pool(std::size_t num_threads)
    : num_threads_(std::max<std::size_t>(num_threads, 1)),
      process_(static_cast<std::int64_t>(getpid())),
      state_(new State) {
  try {
    state_->threads.reserve(num_threads_ - 1);
    for (std::size_t worker = 1; worker < num_threads_; ++worker) {
      state_->threads.emplace_back([state = state_, worker] { loop(*state, worker); });
    }
  } catch (...) {
    close();
    delete state_;
    throw;
  }
}

Pool::~Pool() {
  if (forked()) return;
  close();
  delete state_;
}

bool Pool::forked() const { return process_ != static_cast<std::int64_t>(getpid()); }

void Pool::run(std::size_t wanted, const std::function<void(std::size_t)>& work) {
  if (forked()) {
    throw std::runtime_error("this Kernels handle belongs to the parent process; make a new one");
  }
  State& state = *state_;
  const std::lock_guard<std::mutex> job(state.job_mutex);
  const std::size_t active = std::clamp<std::size_t>(wanted, 1, num_threads_);
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (state.closed) throw std::runtime_error("this Kernels handle is closed; make a new one");
    if (active > 1) {
      state.work = &work;
      state.active = active;
      state.running = active - 1;
      ++state.generation;
    }
  }
  if (active > 1) state.start.notify_all();
  {
    const DefaultFloatMode mode;
    work(0);
  }
  if (active > 1) {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.done.wait(lock, [&state] { return state.running == 0; });
    state.work = nullptr;
  }
}

void Pool::close() {
  if (forked()) return;
  State& state = *state_;
  const std::lock_guard<std::mutex> job(state.job_mutex);
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.closed = true;
  }
  state.start.notify_all();
  for (std::thread& thread : state.threads) thread.join();
  state.threads.clear();
}

void Pool::loop(State& state, std::size_t worker) {
  const DefaultFloatMode mode;
  std::uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(state.mutex);
  for (;;) {
    state.start.wait(lock, [&] { return state.closed || state.generation != seen; });
    if (state.closed) return;
    seen = state.generation;
    if (worker >= state.active) continue;
    const std::function<void(std::size_t)>* work = state.work;
    lock.unlock();
    (*work)(worker);
    lock.lock();
    if (--state.running == 0) state.done.notify_one();
  }
}

}  // namespace zp
