// Drives the I/O engines without Python, for the sanitizers: several callers share an engine, every
// buffer is a heap block of exactly its size.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "io/checksum.h"
#include "io/engine.h"
#include "io/files.h"

namespace {

using zp::io::Engine;
using zp::io::Fault;
using zp::io::Request;

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
}

struct TemporaryFile {
  TemporaryFile() {
    char name[] = "/tmp/zero-plugin-io-test-XXXXXX";
    descriptor = mkstemp(name);
    if (descriptor >= 0) unlink(name);
  }
  ~TemporaryFile() { close(descriptor); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor;
};

std::vector<char> noise(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> data(bytes);
  for (char& byte : data) byte = static_cast<char>(random());
  return data;
}

void test_callers_share_an_engine(Engine& engine, std::size_t file) {
  constexpr std::size_t kBytes = 200'003;
  std::vector<std::thread> callers;
  std::vector<int> wrong(4, 0);
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      const std::uint64_t base = caller * 300'000u;
      for (unsigned turn = 0; turn < 8; ++turn) {
        std::vector<char> data = noise(kBytes, 10 * caller + turn);
        std::vector<char> back(kBytes, 0);
        const bool wrote =
            !engine.transfer({Request{true, file, base, data.data(), kBytes / 2},
                              Request{true, file, base + kBytes / 2, data.data() + kBytes / 2,
                                      kBytes - kBytes / 2}});
        const bool read = !engine.transfer({Request{false, file, base, back.data(), kBytes}});
        if (!wrote || !read || data != back) ++wrong[caller];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : wrong) expect(count == 0, std::string("bytes through ") + engine.name());
}

void test_faults(Engine& engine, std::size_t file) {
  std::vector<char> back(100'000);
  const std::optional<Fault> fault =
      engine.transfer({Request{false, file, 10'000'000, back.data(), back.size()}});
  expect(fault && fault->error == 0 && fault->got == 0, "a read past the end is a fault");
  const std::size_t broken = engine.add_file({9999, 1});
  const std::optional<Fault> second =
      engine.transfer({Request{true, broken, 0, back.data(), back.size()}});
  expect(second && second->error != 0, "a bad descriptor is a fault");
}

void test_engine(const std::string& kind) {
  TemporaryFile target;
  std::string reason;
  const zp::io::Options options{.queue_depth = 4, .block_bytes = 4096};
  const std::unique_ptr<Engine> engine = zp::io::make_engine(kind, options, reason);
  std::printf("%s: %s (%s)\n", kind.c_str(), engine->name(), reason.c_str());
  const std::size_t file = engine->add_file({target.descriptor, 1});
  test_callers_share_an_engine(*engine, file);
  std::vector<char> registered(1 << 16);
  engine->register_memory(registered.data(), registered.size());
  expect(!engine->transfer({Request{false, file, 0, registered.data(), registered.size()}}),
         "registered memory is read into");
  test_callers_share_an_engine(*engine, file);
  test_faults(*engine, file);
  engine->close();
  engine->close();
  try {
    engine->transfer({Request{false, file, 0, registered.data(), 1}});
    expect(false, "a closed engine refuses");
  } catch (const std::runtime_error&) {
  }
}

void test_start_and_stop() {
  for (int turn = 0; turn < 30; ++turn) {
    std::string reason;
    const auto engine = zp::io::make_engine(turn % 2 == 0 ? "auto" : "threads", {}, reason);
  }
}

void test_checksums() {
  for (std::size_t bytes = 0; bytes < 70; ++bytes) {
    const std::vector<char> data = noise(bytes, static_cast<unsigned>(bytes));
    expect(zp::io::crc32c(data.data(), bytes) == zp::io::crc32c_portable(data.data(), bytes),
           "checksums agree");
    std::vector<std::uint32_t> sums((bytes + 15) / 16);
    zp::io::block_sums(data.data(), bytes, 16, sums.data());
    expect(zp::io::first_mismatch(data.data(), bytes, 16, sums.data()) == -1, "sums match");
  }
}

}  // namespace

int main() {
  test_engine("auto");
  test_engine("threads");
  test_start_and_stop();
  test_checksums();
  std::printf("%s\n", failures == 0 ? "all native tests passed" : "native tests failed");
  return failures == 0 ? 0 : 1;
}
