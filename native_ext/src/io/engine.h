// Reads and writes of files, many at once: one interface, two engines behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zp::io {

struct Request {
  bool write = false;
  std::size_t file = 0;  // what add_file() returned
  std::uint64_t offset = 0;
  char* data = nullptr;
  std::uint64_t bytes = 0;
};

// Why a transfer stopped: what was asked of the file at `offset` and how much of that was moved.
struct Fault {
  std::size_t file = 0;
  bool write = false;
  std::uint64_t offset = 0;
  std::uint64_t wanted = 0;
  std::uint64_t got = 0;
  int error = 0;  // errno; 0: the file ended, or the system moved nothing and named no reason
};

// `alignment`: of offsets and sizes, 1 where any will do. After a short transfer the rest starts at
// a multiple of it.
struct File {
  int descriptor = -1;
  std::uint64_t alignment = 1;
};

struct Options {
  std::size_t queue_depth = 32;  // operations of one transfer in flight at once
  std::uint64_t block_bytes = 1 << 20;
};

// Several threads may call one engine; transfers of different threads run at the same time. In a
// child made by fork() every call but the destructor throws.
class Engine {
 public:
  explicit Engine(const Options& options);
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const char* name() const = 0;

  // The descriptor stays the caller's, who closes it after the engine.
  std::size_t add_file(const File& file);

  // Memory that transfers will use and that stays mapped until close(). Its whole pages are absent
  // from children made by fork(): direct I/O would otherwise go to the child's copy of a page, or
  // to nobody's, where a transfer runs during the fork (open(2), NOTES) or the pages are
  // registered.
  virtual void register_memory(char* data, std::uint64_t bytes);

  // How registering went: empty, or why it was of no use. Known after a transfer.
  virtual std::string registration() const = 0;

  // Returns when every request has ended, or when one has failed and the others have stopped, so
  // that nothing touches the memory any more.
  virtual std::optional<Fault> transfer(const std::vector<Request>& requests) = 0;

  // Waits for running transfers; may be called twice.
  virtual void close();

  const Options& options() const { return options_; }

 protected:
  void check_process() const;
  bool forked() const;
  // The files as they are now; throws std::invalid_argument for a request that cannot be right.
  std::vector<File> files_for(const std::vector<Request>& requests) const;
  std::vector<File> files() const;

 private:
  const Options options_;
  const std::int64_t process_;
  mutable std::mutex files_mutex_;
  std::vector<File> files_;
  std::vector<std::pair<char*, std::uint64_t>> memory_;
};

std::unique_ptr<Engine> make_threads_engine(const Options& options);

// Null where io_uring is not compiled in, refused or too old; the reason goes to `reason`.
std::unique_ptr<Engine> make_uring_engine(const Options& options, std::string& reason);

// `kind`: "auto", "uring" or "threads". With "auto", `reason` says why the engine was chosen;
// "uring" throws std::runtime_error where it cannot be had.
std::unique_ptr<Engine> make_engine(const std::string& kind, const Options& options,
                                    std::string& reason);

// ------------------------------------------------------------------ shared by the engines

// One operation's worth of a request and how far it has come.
struct Piece {
  std::size_t request = 0;
  std::size_t file = 0;
  bool write = false;
  std::uint64_t offset = 0;
  char* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t done = 0;
  unsigned stalls = 0;  // results in a row that brought it no further
};

// Cuts requests, in order, into pieces of at most `block_bytes`.
class Cutter {
 public:
  Cutter(const std::vector<Request>& requests, std::uint64_t block_bytes)
      : requests_(&requests), block_bytes_(block_bytes) {}

  bool next(Piece& piece);

 private:
  const std::vector<Request>* requests_;
  std::uint64_t block_bytes_;
  std::size_t request_ = 0;
  std::uint64_t offset_ = 0;
};

enum class Verdict { kEnded, kAgain, kFailed };

// Takes the result of one read or write of the rest of `piece` (bytes, or -errno) and says what to
// do next; `fault` is filled in for kFailed.
Verdict advance(Piece& piece, std::int64_t result, std::uint64_t alignment, Fault& fault);

// Waits a little when a piece has been put off several times.
void back_off(const Piece& piece);
void back_off(unsigned stalls);

}  // namespace zp::io
