// The Python border: addresses and dtype codes in, nothing but plain values out.
// zero_plugin/kernels.py checks tensors before it calls in here. nanobind's headers are not held to
// our warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wconversion"
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module_io.h"
#pragma GCC diagnostic pop

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "types.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = std::uint64_t;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));  // NOLINT
}

zp::Dtype dtype(int code, bool none_allowed = false) {
  if (code < (none_allowed ? -1 : 0) || code > 2) {
    throw std::invalid_argument("dtype code " + std::to_string(code) + " is not known");
  }
  return static_cast<zp::Dtype>(code);
}

void copy(zp::Kernels& self, Address destination, int destination_dtype, Address source,
          int source_dtype, std::size_t numel) {
  self.copy(pointer<void>(destination), dtype(destination_dtype), pointer<const void>(source),
            dtype(source_dtype), numel);
}

void accumulate(zp::Kernels& self, Address destination, Address source, int source_dtype,
                std::size_t numel) {
  self.accumulate(pointer<float>(destination), pointer<const void>(source), dtype(source_dtype),
                  numel);
}

void sum_ranks(zp::Kernels& self, Address destination, int destination_dtype,
               const std::vector<Address>& parts, const std::vector<int>& part_dtypes, int divisor,
               std::size_t numel) {
  if (parts.empty() || parts.size() != part_dtypes.size()) {
    throw std::invalid_argument("sum_ranks needs at least one part and one dtype for each");
  }
  std::vector<const void*> pointers;
  std::vector<zp::Dtype> dtypes;
  for (const Address part : parts) pointers.push_back(pointer<const void>(part));
  for (const int code : part_dtypes) dtypes.push_back(dtype(code));
  self.sum_ranks(pointer<void>(destination), dtype(destination_dtype), pointers, dtypes,
                 static_cast<float>(divisor), numel);
}

std::tuple<std::vector<std::uint64_t>, std::uint32_t, std::uint64_t> norm_partial(
    zp::Kernels& self, Address source, int source_dtype, std::size_t numel) {
  const zp::NormState state =
      self.norm_partial(pointer<const void>(source), dtype(source_dtype), numel);
  return {std::vector<std::uint64_t>(state.limbs, state.limbs + zp::kNormLimbs), state.absmax_bits,
          state.nonfinite};
}

void update(zp::Kernels& self, int rule, Address segments, std::size_t num_segments, Address hyper,
            std::size_t num_rows, int gradient_dtype, int output_dtype, double scale,
            std::optional<double> clip_value, bool split, int moments, Address places,
            Address sources) {
  if (rule < 0 || rule >= zp::kNumRules) {
    throw std::invalid_argument("rule " + std::to_string(rule) + " is not known");
  }
  if (moments < 0 || moments > 2) {
    throw std::invalid_argument("moments code " + std::to_string(moments) + " is not known");
  }
  const zp::UpdateOptions options{.rule = static_cast<zp::Rule>(rule),
                                  .gradient_dtype = dtype(gradient_dtype),
                                  .output_dtype = dtype(output_dtype, true),
                                  .scale = static_cast<float>(scale),
                                  .clip_value = static_cast<float>(clip_value.value_or(0.0)),
                                  .clip = clip_value.has_value(),
                                  .stream = false,
                                  .split = split,
                                  .moments = static_cast<zp::Moments>(moments),
                                  .apart = false};
  self.update(pointer<const std::int64_t>(segments), num_segments, pointer<const double>(hyper),
              num_rows, pointer<const std::int64_t>(places), pointer<const std::int64_t>(sources),
              options);
}

void stream(zp::Kernels& self, Address segments, std::size_t num_segments) {
  self.stream(pointer<const std::int64_t>(segments), num_segments);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() =
      "Compiled kernels of zero-plugin. Use zero_plugin.kernels, which checks what it passes in.";
  module.attr("SEGMENT_COLUMNS") = static_cast<int>(zp::kNumSegmentColumns);
  module.attr("HYPER_COLUMNS") = zp::kHyperColumns;
  module.attr("PLACE_COLUMNS") = static_cast<int>(zp::kNumPlaceColumns);
  module.attr("SOURCE_COLUMNS") = static_cast<int>(zp::kNumSourceColumns);
  module.attr("GROUP") = zp::kGroup;
  module.def("available_isas", &zp::available_isas,
             "Instruction sets compiled in that this machine has, best last.");

  nb::class_<zp::Kernels>(module, "Kernels",
                          "Kernels of one instruction set on own worker threads.")
      .def(nb::init<std::size_t, const std::string&>(), "threads"_a, "isa"_a, NoGil())
      .def_prop_ro("threads", &zp::Kernels::num_threads)
      .def_prop_ro("isa", &zp::Kernels::isa)
      .def("copy", &copy, "destination"_a, "destination_dtype"_a, "source"_a, "source_dtype"_a,
           "numel"_a, NoGil())
      .def("accumulate", &accumulate, "destination"_a, "source"_a, "source_dtype"_a, "numel"_a,
           NoGil())
      .def("sum_ranks", &sum_ranks, "destination"_a, "destination_dtype"_a, "parts"_a,
           "part_dtypes"_a, "divisor"_a, "numel"_a, NoGil())
      .def("norm_partial", &norm_partial, "source"_a, "source_dtype"_a, "numel"_a, NoGil())
      .def("update", &update, "rule"_a, "segments"_a, "num_segments"_a, "hyper"_a, "num_rows"_a,
           "gradient_dtype"_a, "output_dtype"_a, "scale"_a, "clip_value"_a.none(), "split"_a,
           "moments"_a, "places"_a, "sources"_a, NoGil())
      .def("stream", &stream, "segments"_a, "num_segments"_a, NoGil())
      .def("close", &zp::Kernels::close, NoGil());

  bind_io(module);
}
