// The handle: kernels of one instruction set run on one pool of threads. Knows nothing of Python or
// torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pool.h"
#include "types.h"

namespace zp {

class Kernels {
 public:
  Kernels(std::size_t num_threads, const std::string& isa);

  std::size_t num_threads() const { return pool_.num_threads(); }
  const char* isa() const { return table_.name; }

  void copy(void* destination, Dtype destination_dtype, const void* source, Dtype source_dtype,
            std::size_t numel);
  void accumulate(float* destination, const void* source, Dtype source_dtype, std::size_t numel);
  void sum_ranks(void* destination, Dtype destination_dtype, const std::vector<const void*>& parts,
                 const std::vector<Dtype>& part_dtypes, float divisor, std::size_t numel);
  NormState norm_partial(const void* source, Dtype dtype, std::size_t numel);

  // `segments` is a table [num_segments][kNumSegmentColumns], `hyper` one of
  // [num_rows][kHyperColumns]. Throws std::invalid_argument when a row cannot be right (negative
  // size, null or misaligned pointer, hyper row out of range); nothing is written then. `places`, a
  // table [num_segments][kNumPlaceColumns], is read where the states are not floats. `sources`, a
  // table [num_segments][kNumSourceColumns], says where master and states are read from; null: from
  // where they are written to.
  void update(const std::int64_t* segments, std::size_t num_segments, const double* hyper,
              std::size_t num_rows, const std::int64_t* places, const std::int64_t* sources,
              UpdateOptions options);
  void stream(const std::int64_t* segments, std::size_t num_segments);

  void close() { pool_.close(); }

 private:
  void each_chunk(std::size_t numel, const std::function<void(std::size_t, std::size_t)>& body);
  void each_piece(const std::int64_t* segments, std::size_t num_segments, const double* hyper,
                  const std::int64_t* places, const std::int64_t* sources,
                  const UpdateOptions& options, const std::function<void(const Piece&)>& body);

  const KernelTable& table_;
  Pool pool_;
};

}  // namespace zp
