// The engine for systems that refuse io_uring: worker threads with pread and pwrite.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "io/engine.h"

namespace zp::io {
namespace {

constexpr std::size_t kMaxThreads = 16;

// One call of transfer().
struct Job {
  Job(const std::vector<Request>& requests, std::vector<File> known, std::uint64_t block_bytes)
      : files(std::move(known)), cutter(requests, block_bytes) {}

  std::vector<File> files;
  Cutter cutter;
  std::size_t running = 0;
  bool exhausted = false;
  std::optional<Fault> fault;
  std::condition_variable ended;
};

// Moves one piece; nothing when it arrived whole.
std::optional<Fault> move(Piece& piece, const File& file) {
  for (;;) {
    char* const data = piece.data + piece.done;
    const auto bytes = static_cast<std::size_t>(piece.bytes - piece.done);
    const auto offset = static_cast<off_t>(piece.offset + piece.done);
    const ssize_t moved = piece.write ? pwrite(file.descriptor, data, bytes, offset)
                                      : pread(file.descriptor, data, bytes, offset);
    Fault fault;
    switch (advance(piece, moved < 0 ? -errno : moved, file.alignment, fault)) {
      case Verdict::kEnded:
        return std::nullopt;
      case Verdict::kFailed:
        return fault;
      case Verdict::kAgain:
        back_off(piece);
    }
  }
}

class ThreadsEngine final : public Engine {
 public:
  explicit ThreadsEngine(const Options& options)
      : Engine(options),
        max_threads_(std::min(options.queue_depth, kMaxThreads)),
        state_(new State) {}

  ~ThreadsEngine() override {
    // In a forked child the threads do not exist and the locks may be held for ever: leaked.
    if (forked()) return;
    close();
    delete state_;
  }

  const char* name() const override { return "threads"; }
  std::string registration() const override { return "the thread pool registers nothing"; }

  std::optional<Fault> transfer(const std::vector<Request>& requests) override {
    check_process();
    Job job(requests, files_for(requests), options().block_bytes);
    if (requests.empty()) return std::nullopt;
    State& state = *state_;
    std::unique_lock<std::mutex> lock(state.mutex);
    if (state.closed) throw std::runtime_error("this I/O engine is closed");
    start_threads(requests);
    state.jobs.push_back(&job);
    ++state.transfers;
    state.work.notify_all();
    job.ended.wait(lock, [&job] { return job.exhausted && job.running == 0; });
    if (--state.transfers == 0) state.idle.notify_all();
    return job.fault;
  }

  void close() override {
    if (forked()) return;
    State& state = *state_;
    std::vector<std::thread> threads;
    {
      std::unique_lock<std::mutex> lock(state.mutex);
      state.closed = true;
      state.idle.wait(lock, [&state] { return state.transfers == 0; });
      threads.swap(state.threads);
    }
    state.work.notify_all();
    for (std::thread& thread : threads) thread.join();
    Engine::close();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable work;
    std::condition_variable idle;
    std::deque<Job*> jobs;  // those with pieces left, served in turn
    std::vector<std::thread> threads;
    std::size_t transfers = 0;
    bool closed = false;
  };

  // As many as the work can use; fewer where the system has no more, at least one.
  void start_threads(const std::vector<Request>& requests) {
    std::uint64_t pieces = 0;
    for (const Request& request : requests) pieces += request.bytes / options().block_bytes + 1;
    const auto wanted = std::min<std::uint64_t>(pieces, max_threads_);
    try {
      while (state_->threads.size() < wanted) {
        state_->threads.emplace_back([state = state_] { loop(*state); });
      }
    } catch (const std::system_error&) {
      if (state_->threads.empty()) throw;
    }
  }

  static void exhaust(State& state, Job& job) {
    job.exhausted = true;
    std::erase(state.jobs, &job);
  }

  static void loop(State& state) {
    std::unique_lock<std::mutex> lock(state.mutex);
    for (;;) {
      state.work.wait(
          lock, [&state] { return !state.jobs.empty() || (state.closed && state.transfers == 0); });
      if (state.jobs.empty()) return;
      Job& job = *state.jobs.front();
      Piece piece;
      if (!job.cutter.next(piece)) {
        exhaust(state, job);
        if (job.running == 0) job.ended.notify_all();
        continue;
      }
      state.jobs.pop_front();
      state.jobs.push_back(&job);
      ++job.running;
      lock.unlock();
      const std::optional<Fault> fault = move(piece, job.files[piece.file]);
      lock.lock();
      --job.running;
      if (fault && !job.fault) job.fault = fault;
      if (job.fault) exhaust(state, job);
      if (job.exhausted && job.running == 0) job.ended.notify_all();
    }
  }

  const std::size_t max_threads_;
  State* state_;
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(const Options& options) {
  return std::make_unique<ThreadsEngine>(options);
}

}  // namespace zp::io
