// A small pool of worker threads owned by one handle.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zp {

// The calling thread is worker 0 and works too, so `num_threads` = 1 starts no thread. Jobs from
// several callers run one after the other. In a child made by fork() the pool has no threads: run()
// refuses there and close() does nothing.
class Pool {
 public:
  explicit Pool(std::size_t num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::size_t num_threads() const { return num_threads_; }

  // Runs work(worker) for worker = 0 .. min(wanted, num_threads) - 1 and returns when all have
  // ended. `work` must not throw. Throws std::runtime_error after close() and in a forked child.
  void run(std::size_t wanted, const std::function<void(std::size_t)>& work);

  // Waits for a running job, then joins the threads. May be called twice.
  void close();

 private:
  struct State {
    std::mutex job_mutex;  // held for a whole job
    std::mutex mutex;      // guards what follows
    std::condition_variable start;
    std::condition_variable done;
    const std::function<void(std::size_t)>* work = nullptr;
    std::uint64_t generation = 0;
    std::size_t active = 0;   // workers taking part in this generation, the caller included
    std::size_t running = 0;  // pool threads that have not ended this generation yet
    bool closed = false;
    std::vector<std::thread> threads;
  };

  static void loop(State& state, std::size_t worker);
  bool forked() const;

  const std::size_t num_threads_;
  const std::int64_t process_;
  // Leaked on purpose in a forked child: its threads do not exist there and its locks may be held
  // for ever.
  State* state_;
};

}  // namespace zp
