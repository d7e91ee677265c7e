#include "io/engine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace zp::io {
namespace {

constexpr unsigned kMaxEmpty = 8;        // results without progress and without an error
constexpr unsigned kPatientStalls = 16;  // put off this often, an operation is retried at once
constexpr unsigned kMaxStalls = 5'000;   // about five seconds
constexpr std::uint64_t kMaxBlock = 1u << 30;

// Whether forked children get the whole pages within a range.
void share_with_children(const char* data, std::uint64_t bytes, bool share) {
#if defined(MADV_DONTFORK) && defined(MADV_DOFORK)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(data);  // NOLINT
  const std::uintptr_t begin = (address + page - 1) / page * page;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin >= end) return;
  // Refused for mappings of devices, which children do not get in any case.
  madvise(reinterpret_cast<void*>(begin), end - begin,  // NOLINT
          share ? MADV_DOFORK : MADV_DONTFORK);
#else
  (void)data, (void)bytes, (void)share;
#endif
}

}  // namespace

Engine::Engine(const Options& options)
    : options_{std::clamp<std::size_t>(options.queue_depth, 1, 4096),
               std::min(options.block_bytes, kMaxBlock)},
      process_(static_cast<std::int64_t>(getpid())) {
  if (options.block_bytes == 0 || options.block_bytes % 4096 != 0) {
    throw std::invalid_argument("block_bytes is " + std::to_string(options.block_bytes) +
                                "; it must be a positive multiple of 4096");
  }
}

bool Engine::forked() const { return process_ != static_cast<std::int64_t>(getpid()); }

void Engine::check_process() const {
  if (forked()) {
    throw std::runtime_error("this I/O engine belongs to the parent process; make a new one");
  }
}

std::size_t Engine::add_file(const File& file) {
  check_process();
  if (file.descriptor < 0 || file.alignment == 0) throw std::invalid_argument("not an open file");
  const std::lock_guard<std::mutex> lock(files_mutex_);
  files_.push_back(file);
  return files_.size() - 1;
}

void Engine::register_memory(char* data, std::uint64_t bytes) {
  check_process();
  share_with_children(data, bytes, false);
  const std::lock_guard<std::mutex> lock(files_mutex_);
  memory_.emplace_back(data, bytes);
}

void Engine::close() {
  const std::lock_guard<std::mutex> lock(files_mutex_);
  for (const auto& [data, bytes] : memory_) share_with_children(data, bytes, true);
  memory_.clear();
}

std::vector<File> Engine::files() const {
  const std::lock_guard<std::mutex> lock(files_mutex_);
  return files_;
}

std::vector<File> Engine::files_for(const std::vector<Request>& requests) const {
  std::vector<File> known = files();
  for (const Request& request : requests) {
    if (request.file >= known.size()) {
      throw std::invalid_argument("file " + std::to_string(request.file) + " is not known");
    }
    const std::uint64_t alignment = known[request.file].alignment;
    if (request.offset % alignment != 0 || request.bytes % alignment != 0) {
      throw std::invalid_argument("offset " + std::to_string(request.offset) + " and size " +
                                  std::to_string(request.bytes) + " are not multiples of " +
                                  std::to_string(alignment));
    }
  }
  return known;
}

std::unique_ptr<Engine> make_engine(const std::string& kind, const Options& options,
                                    std::string& reason) {
  if (kind == "threads") {
    reason = "asked for";
    return make_threads_engine(options);
  }
  if (kind != "auto" && kind != "uring") {
    throw std::invalid_argument("engine '" + kind + "' is not known; use auto, uring or threads");
  }
  std::string refusal;
  if (std::unique_ptr<Engine> engine = make_uring_engine(options, refusal)) {
    reason = kind == "auto" ? "io_uring works here" : "asked for";
    return engine;
  }
  if (kind == "uring") throw std::runtime_error(refusal);
  reason = refusal;
  return make_threads_engine(options);
}

bool Cutter::next(Piece& piece) {
  while (request_ < requests_->size() && offset_ == (*requests_)[request_].bytes) {
    ++request_;
    offset_ = 0;
  }
  if (request_ == requests_->size()) return false;
  const Request& request = (*requests_)[request_];
  const std::uint64_t bytes = std::min(block_bytes_, request.bytes - offset_);
  piece = Piece{.request = request_,
                .file = request.file,
                .write = request.write,
                .offset = request.offset + offset_,
                .data = request.data + offset_,
                .bytes = bytes};
  offset_ += bytes;
  return true;
}

Verdict advance(Piece& piece, std::int64_t result, std::uint64_t alignment, Fault& fault) {
  const auto failed = [&](int error, std::uint64_t extra) {
    fault = Fault{.file = piece.file,
                  .write = piece.write,
                  .offset = piece.offset,
                  .wanted = piece.bytes,
                  .got = piece.done + extra,
                  .error = error};
    return Verdict::kFailed;
  };
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool later = error == EINTR || error == EAGAIN || error == EWOULDBLOCK;
    if (!later || ++piece.stalls > kMaxStalls) return failed(error, 0);
    return Verdict::kAgain;
  }
  const std::uint64_t rest = piece.bytes - piece.done;
  const auto moved = std::min(static_cast<std::uint64_t>(result), rest);
  if (moved == rest) {
    piece.done = piece.bytes;
    return Verdict::kEnded;
  }
  if (moved == 0 && !piece.write) return failed(0, 0);
  // A direct transfer can only go on from a multiple of the alignment; what lies past it is moved
  // once more.
  const std::uint64_t forward = moved - moved % alignment;
  if (forward > 0) {
    piece.done += forward;
    piece.stalls = 0;
    return Verdict::kAgain;
  }
  return ++piece.stalls > kMaxEmpty ? failed(0, moved) : Verdict::kAgain;
}

void back_off(unsigned stalls) {
  if (stalls > kPatientStalls) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void back_off(const Piece& piece) { back_off(piece.stalls); }

}  // namespace zp::io
