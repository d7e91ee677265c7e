// The Python border of the I/O engines: zero_plugin/store checks what it passes in.
// nanobind's headers are not held to our warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wconversion"
#include "module_io.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "io/checksum.h"
#include "io/engine.h"
#include "io/files.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = std::uint64_t;
using NoGil = nb::call_guard<nb::gil_scoped_release>;
using RequestTuple = std::tuple<bool, std::size_t, std::uint64_t, Address, std::uint64_t>;
using FaultTuple = std::tuple<std::size_t, bool, std::uint64_t, std::uint64_t, std::uint64_t, int>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));  // NOLINT
}

class IoEngine {
 public:
  IoEngine(const std::string& kind, std::size_t queue_depth, std::uint64_t block_bytes)
      : engine_(zp::io::make_engine(kind, {queue_depth, block_bytes}, reason_)) {}

  std::string name() const { return engine_->name(); }
  std::string reason() const { return reason_; }
  std::string registration() const { return engine_->registration(); }

  std::size_t add_file(int descriptor, std::uint64_t alignment) {
    return engine_->add_file({descriptor, alignment});
  }

  void register_memory(Address address, std::uint64_t bytes) {
    engine_->register_memory(pointer<char>(address), bytes);
  }

  std::optional<FaultTuple> transfer(const std::vector<RequestTuple>& tuples) {
    std::vector<zp::io::Request> requests;
    requests.reserve(tuples.size());
    for (const auto& [write, file, offset, address, bytes] : tuples) {
      requests.push_back({write, file, offset, pointer<char>(address), bytes});
    }
    const std::optional<zp::io::Fault> fault = engine_->transfer(requests);
    if (!fault) return std::nullopt;
    return FaultTuple{fault->file,   fault->write, fault->offset,
                      fault->wanted, fault->got,   fault->error};
  }

  void close() { engine_->close(); }

 private:
  std::string reason_;
  std::unique_ptr<zp::io::Engine> engine_;
};

std::tuple<std::uint32_t, std::uint32_t> direct_alignment(int descriptor) {
  const zp::io::DirectAlignment found = zp::io::direct_alignment(descriptor);
  return {found.memory, found.offset};
}

std::uint32_t crc32c(Address address, std::size_t bytes, bool portable) {
  const auto* const data = pointer<const char>(address);
  return portable ? zp::io::crc32c_portable(data, bytes) : zp::io::crc32c(data, bytes);
}

void block_sums(Address address, std::size_t bytes, std::size_t block, Address sums) {
  zp::io::block_sums(pointer<const char>(address), bytes, block, pointer<std::uint32_t>(sums));
}

std::int64_t first_mismatch(Address address, std::size_t bytes, std::size_t block, Address sums) {
  return zp::io::first_mismatch(pointer<const char>(address), bytes, block,
                                pointer<const std::uint32_t>(sums));
}

}  // namespace

void bind_io(nb::module_& module) {
  nb::class_<IoEngine>(module, "IoEngine", "Reads and writes of files, many at once.")
      .def(nb::init<const std::string&, std::size_t, std::uint64_t>(), "kind"_a, "queue_depth"_a,
           "block_bytes"_a, NoGil())
      .def_prop_ro("name", &IoEngine::name)
      .def_prop_ro("reason", &IoEngine::reason)
      .def_prop_ro("registration", &IoEngine::registration)
      .def("add_file", &IoEngine::add_file, "descriptor"_a, "alignment"_a)
      .def("register_memory", &IoEngine::register_memory, "address"_a, "nbytes"_a, NoGil())
      .def(
          "transfer", &IoEngine::transfer, "requests"_a, NoGil(),
          "Requests are (write, file, offset, address, bytes). None when all ended, else (file, "
          "write, offset, wanted, got, errno) of the first that failed; errno 0 is the file's end.")
      .def("close", &IoEngine::close, NoGil());
  module.def("direct_alignment", &direct_alignment, "descriptor"_a,
             "What direct I/O asks of (addresses, offsets); zeros where the system does not say.");
  module.def("file_system", &zp::io::file_system, "descriptor"_a,
             "Name of the file system that an open file lies on.");
  module.def("crc32c", &crc32c, "address"_a, "nbytes"_a, "portable"_a = false, NoGil(),
             "CRC-32C of memory; portable: by table.");
  module.def("block_sums", &block_sums, "address"_a, "nbytes"_a, "block"_a, "sums"_a, NoGil(),
             "Writes one uint32 sum, never 0, for each block of memory.");
  module.def("first_mismatch", &first_mismatch, "address"_a, "nbytes"_a, "block"_a, "sums"_a,
             NoGil(), "First block whose sum is not the one kept (0: not looked at), or -1.");
}
