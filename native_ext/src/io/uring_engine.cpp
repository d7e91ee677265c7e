// The engine on io_uring. Every running transfer has a ring of its own, so that a reading and a
// writing thread share nothing.
#include "io/engine.h"
#include "io/ring.h"

#ifdef ZP_HAS_URING

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace zp::io {
namespace {

constexpr std::uint64_t kMaxBuffer = std::uint64_t{1} << 30;  // the kernel's, for one buffer
constexpr std::size_t kMaxBuffers = 1024;
constexpr unsigned kMaxRefusals = 5'000;  // of the system call itself, about five seconds

struct Session {
  explicit Session(unsigned entries) : ring(entries) {}

  Ring ring;
  std::uint64_t generation = 0;  // of the registrations below
  bool files = false;
  bool buffers = false;
  std::vector<iovec> registered;
};

// What the engine wants registered with every ring.
struct Wanted {
  std::uint64_t generation = 1;
  std::vector<iovec> buffers;
};

// One call of transfer().
class Transfer {
 public:
  Transfer(Session& session, const std::vector<Request>& requests, const std::vector<File>& files,
           const Options& options)
      : session_(session),
        files_(files),
        cutter_(requests, options.block_bytes),
        pieces_(options.queue_depth) {
    for (std::size_t slot = options.queue_depth; slot > 0; --slot) free_.push_back(slot - 1);
  }

  std::optional<Fault> run() {
    for (;;) {
      fill();
      if (in_flight_ == 0) return fault_;
      enter();
      collect();
    }
  }

 private:
  // Keeps the queue full; after a fault nothing new is started.
  void fill() {
    if (fault_) return;
    unsigned stalls = 0;
    for (const std::size_t slot : again_) {
      stalls = std::max(stalls, pieces_[slot].stalls);
      start(slot);
    }
    again_.clear();
    back_off(stalls);
    while (!free_.empty() && cutter_.next(pieces_[free_.back()])) {
      start(free_.back());
      free_.pop_back();
    }
  }

  void start(std::size_t slot) {
    const Piece& piece = pieces_[slot];
    io_uring_sqe& entry = session_.ring.prepare();
    char* const data = piece.data + piece.done;
    const std::uint64_t bytes = piece.bytes - piece.done;
    const int buffer = buffer_of(data, bytes);
    if (buffer >= 0) {
      entry.opcode = piece.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
      entry.buf_index = static_cast<std::uint16_t>(buffer);
    } else {
      entry.opcode = piece.write ? IORING_OP_WRITE : IORING_OP_READ;
    }
    if (session_.files) {
      entry.flags = IOSQE_FIXED_FILE;
      entry.fd = static_cast<std::int32_t>(piece.file);
    } else {
      entry.fd = files_[piece.file].descriptor;
    }
    entry.off = piece.offset + piece.done;
    entry.addr = reinterpret_cast<std::uintptr_t>(data);  // NOLINT
    entry.len = static_cast<std::uint32_t>(bytes);
    entry.user_data = slot;
    ++in_flight_;
  }

  int buffer_of(const char* data, std::uint64_t bytes) const {
    if (!session_.buffers) return -1;
    for (std::size_t index = 0; index < session_.registered.size(); ++index) {
      const iovec& buffer = session_.registered[index];
      const char* const begin = static_cast<const char*>(buffer.iov_base);
      if (data >= begin && data + bytes <= begin + buffer.iov_len) return static_cast<int>(index);
    }
    return -1;
  }

  void enter() {
    const int error = session_.ring.enter(1);
    if (error == 0) {
      refusals_ = 0;
      return;
    }
    if (error == EINTR) return;
    if ((error == EAGAIN || error == EBUSY || error == ENOMEM) && ++refusals_ < kMaxRefusals) {
      back_off(refusals_);
      return;
    }
    // The kernel takes no more: what it has not taken will not run, what it has must still end.
    const unsigned lost = session_.ring.retract();
    in_flight_ -= lost;
    if (!fault_) fault_ = Fault{.wanted = lost, .error = error};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void collect() {
    std::array<Completion, 64> batch;
    while (const std::size_t count = session_.ring.take(batch.data(), batch.size())) {
      for (std::size_t place = 0; place < count; ++place) end(batch[place]);
    }
  }

  void end(const Completion& completion) {
    const auto slot = static_cast<std::size_t>(completion.tag);
    Piece& piece = pieces_[slot];
    --in_flight_;
    Fault fault;
    switch (advance(piece, completion.result, files_[piece.file].alignment, fault)) {
      case Verdict::kAgain:
        again_.push_back(slot);
        return;
      case Verdict::kFailed:
        if (!fault_) fault_ = fault;
        break;
      case Verdict::kEnded:
        break;
    }
    free_.push_back(slot);
  }

  Session& session_;
  const std::vector<File>& files_;
  Cutter cutter_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> free_;
  std::vector<std::size_t> again_;
  std::size_t in_flight_ = 0;
  unsigned refusals_ = 0;
  std::optional<Fault> fault_;
};

class UringEngine final : public Engine {
 public:
  UringEngine(const Options& options, std::unique_ptr<Session> first)
      : Engine(options), state_(new State) {
    state_->sessions = 1;
    state_->free.push_back(std::move(first));
  }

  ~UringEngine() override {
    if (forked()) return;  // the locks may be held for ever there
    close();
    delete state_;
  }

  const char* name() const override { return "uring"; }

  void register_memory(char* data, std::uint64_t bytes) override {
    Engine::register_memory(data, bytes);
    const std::lock_guard<std::mutex> lock(state_->mutex);
    for (std::uint64_t start = 0; start < bytes; start += kMaxBuffer) {
      const std::uint64_t size = std::min(kMaxBuffer, bytes - start);
      state_->wanted.buffers.push_back(iovec{data + start, static_cast<std::size_t>(size)});
    }
    ++state_->wanted.generation;
  }

  std::string registration() const override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->refusal;
  }

  std::optional<Fault> transfer(const std::vector<Request>& requests) override {
    check_process();
    const std::vector<File> known = files_for(requests);
    std::unique_ptr<Session> session = check_out(known);
    std::optional<Fault> fault;
    try {
      fault = Transfer(*session, requests, known, options()).run();
    } catch (...) {
      check_in(std::move(session));
      throw;
    }
    check_in(std::move(session));
    return fault;
  }

  void close() override {
    if (forked()) return;
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->closed = true;
    state_->returned.wait(lock, [this] { return state_->free.size() == state_->sessions; });
    state_->free.clear();
    state_->sessions = 0;
    lock.unlock();
    Engine::close();
  }

 private:
  struct State {
    mutable std::mutex mutex;
    std::condition_variable returned;
    std::vector<std::unique_ptr<Session>> free;
    std::size_t sessions = 0;
    Wanted wanted;
    std::size_t registered_files = 0;
    std::string refusal;
    bool closed = false;
  };

  std::unique_ptr<Session> check_out(const std::vector<File>& known) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (state_->closed) throw std::runtime_error("this I/O engine is closed");
    if (known.size() != state_->registered_files) {
      state_->registered_files = known.size();
      ++state_->wanted.generation;
    }
    if (state_->free.empty()) add_session();
    // Where the system gives no further ring, transfers take turns.
    state_->returned.wait(lock, [this] { return !state_->free.empty(); });
    std::unique_ptr<Session> session = std::move(state_->free.back());
    state_->free.pop_back();
    const Wanted wanted = state_->wanted;
    lock.unlock();
    if (session->generation != wanted.generation) {
      const std::string refusal = renew(*session, wanted, known);
      lock.lock();
      state_->refusal = refusal;
    }
    return session;
  }

  void add_session() {
    try {
      state_->free.push_back(
          std::make_unique<Session>(static_cast<unsigned>(options().queue_depth)));
      ++state_->sessions;
    } catch (const std::system_error&) {
      if (state_->sessions == 0) throw;
    }
  }

  void check_in(std::unique_ptr<Session> session) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->free.push_back(std::move(session));
    state_->returned.notify_all();
  }

  // Registers files and memory anew with an idle ring; returns what the kernel refused, if
  // anything.
  static std::string renew(Session& session, const Wanted& wanted, const std::vector<File>& known) {
    std::string refusal;
    if (session.files) session.ring.unregister_files();
    if (session.buffers) session.ring.unregister_buffers();
    std::vector<int> descriptors;
    for (const File& file : known) descriptors.push_back(file.descriptor);
    const auto refused = [&refusal](const char* what, int error) {
      if (error != 0) refusal += std::string(what) + ": " + std::strerror(error) + ". ";
      return error != 0;
    };
    session.files = !descriptors.empty() &&
                    !refused("files not registered", session.ring.register_files(descriptors));
    session.registered = wanted.buffers;
    if (session.registered.size() > kMaxBuffers) session.registered.resize(kMaxBuffers);
    session.buffers =
        !session.registered.empty() && !refused("memory not registered (ulimit -l)",
                                                session.ring.register_buffers(session.registered));
    session.generation = wanted.generation;
    return refusal;
  }

  State* state_;
};

std::string refused(const std::string& what) { return what + ": the thread pool is used instead"; }

}  // namespace

std::unique_ptr<Engine> make_uring_engine(const Options& options, std::string& reason) {
  try {
    const auto entries =
        static_cast<unsigned>(std::clamp<std::size_t>(options.queue_depth, 1, 4096));
    auto session = std::make_unique<Session>(entries);
    if (!session->ring.supports(IORING_OP_READ) || !session->ring.supports(IORING_OP_WRITE)) {
      reason = refused("this kernel's io_uring is too old (Linux 5.6 has what is needed)");
      return nullptr;
    }
    // A filter may allow the set-up and refuse the work.
    session->ring.prepare().opcode = IORING_OP_NOP;
    int error = EINTR;
    for (int turn = 0; turn < 100 && (error == EINTR || error == EAGAIN); ++turn) {
      error = session->ring.enter(1);
    }
    Completion done{};
    if (error != 0 || session->ring.take(&done, 1) != 1 || done.result != 0) {
      reason = refused(std::string("io_uring_enter is refused (") + std::strerror(error) + ")");
      return nullptr;
    }
    return std::make_unique<UringEngine>(options, std::move(session));
  } catch (const std::system_error& error) {
    reason = refused(std::string("io_uring is refused (") + error.what() + ")");
    return nullptr;
  }
}

}  // namespace zp::io

#else

namespace zp::io {

std::unique_ptr<Engine> make_uring_engine(const Options&, std::string& reason) {
  reason = "io_uring is not part of this system: the thread pool is used instead";
  return nullptr;
}

}  // namespace zp::io

#endif
