#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace zp {
namespace {

// Chunks are handed out one by one, so that a thread slowed down by others does not hold up the
// job. They are large enough for the hardware prefetchers and a multiple of every block and cache
// line.
constexpr std::size_t kMinChunk = std::size_t{1} << 14;
constexpr std::size_t kMaxChunk = std::size_t{1} << 18;

std::size_t chunk_size(std::size_t numel, std::size_t num_threads) {
  const std::size_t even = numel / (num_threads * 8) + 1;
  return (std::clamp(even, kMinChunk, kMaxChunk) + 1023) / 1024 * 1024;
}

std::size_t size_of(Dtype dtype) {
  if (dtype == Dtype::kNone) return 0;
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// Results larger than this do not stay in a cache until they are read again, so they are written
// past it.
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

template <typename T>
T* pointer(std::int64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));  // NOLINT
}

template <typename T>
T* shifted(T* base, std::size_t elements) {
  return base == nullptr ? nullptr : base + elements;
}

void add_limbs(NormState& total, const NormState& part) {
  unsigned __int128 carry = 0;
  for (int i = 0; i < kNormLimbs; ++i) {
    carry += static_cast<unsigned __int128>(total.limbs[i]) + part.limbs[i];
    total.limbs[i] = static_cast<std::uint64_t>(carry);
    carry >>= 64;
  }
  total.absmax_bits = std::max(total.absmax_bits, part.absmax_bits);
  total.nonfinite += part.nonfinite;
}

constexpr std::size_t kPrefetchAhead = 2048;  // elements past the segment in hand

// The first lines of a segment that is about to be worked on: at a new place the hardware
// prefetchers have nothing to follow yet.
void prefetch_segment(const std::int64_t* segment) {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kLines = 6;
  const std::int64_t bytes = segment[kNumel] * 2;
  for (const int column : {kMaster, kState0, kState1, kGradient}) {
    for (std::int64_t line = 0; line < kLines && line * kLine < bytes; ++line) {
      __builtin_prefetch(pointer<const char>(segment[column]) + line * kLine);
    }
  }
}

[[noreturn]] void refuse(std::size_t row, const std::string& what) {
  throw std::invalid_argument("segment " + std::to_string(row) + ": " + what);
}

void check_pointer(std::size_t row, const char* name, std::int64_t address, std::size_t alignment) {
  if (address == 0) refuse(row, std::string(name) + " pointer is null");
  if (static_cast<std::uint64_t>(address) % alignment != 0) {
    refuse(row, std::string(name) + " pointer is not aligned to its element size");
  }
}

}  // namespace

Kernels::Kernels(std::size_t num_threads, const std::string& isa)
    : table_(kernel_table(isa)), pool_(num_threads) {}

void Kernels::each_chunk(std::size_t numel,
                         const std::function<void(std::size_t, std::size_t)>& body) {
  if (numel == 0) return;
  const std::size_t chunk = chunk_size(numel, pool_.num_threads());
  const std::size_t num_chunks = (numel + chunk - 1) / chunk;
  std::atomic<std::size_t> next{0};
  pool_.run(num_chunks, [&](std::size_t) {
    for (;;) {
      const std::size_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= num_chunks) return;
      const std::size_t start = index * chunk;
      body(start, std::min(chunk, numel - start));
    }
  });
}

void Kernels::copy(void* destination, Dtype destination_dtype, const void* source,
                   Dtype source_dtype, std::size_t numel) {
  const std::size_t destination_size = size_of(destination_dtype);
  const std::size_t source_size = size_of(source_dtype);
  const bool stream = numel * destination_size >= kStreamBytes;
  each_chunk(numel, [&](std::size_t start, std::size_t count) {
    table_.convert(static_cast<char*>(destination) + start * destination_size, destination_dtype,
                   static_cast<const char*>(source) + start * source_size, source_dtype, count,
                   stream);
  });
}

void Kernels::accumulate(float* destination, const void* source, Dtype source_dtype,
                         std::size_t numel) {
  const std::size_t source_size = size_of(source_dtype);
  each_chunk(numel, [&](std::size_t start, std::size_t count) {
    table_.accumulate(destination + start, static_cast<const char*>(source) + start * source_size,
                      source_dtype, count);
  });
}

void Kernels::sum_ranks(void* destination, Dtype destination_dtype,
                        const std::vector<const void*>& parts,
                        const std::vector<Dtype>& part_dtypes, float divisor, std::size_t numel) {
  const std::size_t destination_size = size_of(destination_dtype);
  const bool stream = numel * destination_size >= kStreamBytes;
  each_chunk(numel, [&](std::size_t start, std::size_t count) {
    std::vector<const void*> moved(parts.size());
    for (std::size_t part = 0; part < parts.size(); ++part) {
      moved[part] = static_cast<const char*>(parts[part]) + start * size_of(part_dtypes[part]);
    }
    table_.sum_ranks(static_cast<char*>(destination) + start * destination_size, destination_dtype,
                     moved.data(), part_dtypes.data(), parts.size(), divisor, count, stream);
  });
}

NormState Kernels::norm_partial(const void* source, Dtype dtype, std::size_t numel) {
  NormState total{};
  std::mutex mutex;
  const std::size_t element = size_of(dtype);
  each_chunk(numel, [&](std::size_t start, std::size_t count) {
    NormState part{};
    table_.norm(static_cast<const char*>(source) + start * element, dtype, count, &part);
    const std::lock_guard<std::mutex> lock(mutex);
    add_limbs(total, part);
  });
  return total;
}

void Kernels::each_piece(const std::int64_t* segments, std::size_t num_segments,
                         const double* hyper, std::size_t gradient_size, std::size_t output_size,
                         bool split, const std::function<void(const Piece&)>& body) {
  std::vector<std::size_t> ends(num_segments);
  std::size_t total = 0;
  for (std::size_t row = 0; row < num_segments; ++row) {
    total += static_cast<std::size_t>(segments[row * kNumSegmentColumns + kNumel]);
    ends[row] = total;
  }
  each_chunk(total, [&](std::size_t start, std::size_t count) {
    const std::size_t stop = start + count;
    auto row =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), start) - ends.begin());
    std::size_t at = start;
    std::size_t ahead = row + 1;
    while (at < stop) {
      const std::int64_t* segment = segments + row * kNumSegmentColumns;
      const auto numel = static_cast<std::size_t>(segment[kNumel]);
      const std::size_t begin = ends[row] - numel;
      const std::size_t offset = at - begin;
      const std::size_t part = std::min(ends[row], stop) - at;
      if (part != 0) {
        // Several small segments, or the next large one.
        const std::size_t horizon = std::min(stop, ends[row] + kPrefetchAhead);
        for (; ahead < num_segments && ends[ahead - 1] < horizon; ++ahead) {
          prefetch_segment(segments + ahead * kNumSegmentColumns);
        }
        body(Piece{
            .master = split ? nullptr : shifted(pointer<float>(segment[kMaster]), offset),
            .remainder =
                split ? shifted(pointer<std::uint16_t>(segment[kMaster]), offset) : nullptr,
            .state0 = shifted(pointer<float>(segment[kState0]), offset),
            .state1 = shifted(pointer<float>(segment[kState1]), offset),
            .gradient = shifted(pointer<const char>(segment[kGradient]), offset * gradient_size),
            .output = shifted(pointer<char>(segment[kOutput]), offset * output_size),
            .numel = part,
            .hyper = hyper == nullptr ? nullptr : hyper + segment[kHyperRow] * kHyperColumns,
        });
      }
      at += part;
      ++row;
    }
  });
}

void Kernels::update(const std::int64_t* segments, std::size_t num_segments, const double* hyper,
                     std::size_t num_rows, UpdateOptions options) {
  const std::size_t gradient_size = size_of(options.gradient_dtype);
  const std::size_t output_size = size_of(options.output_dtype);
  if (options.split && options.output_dtype != Dtype::kBfloat16) {
    throw std::invalid_argument("the split form needs bf16 outputs: they are half of the master");
  }
  std::size_t numel = 0;
  for (std::size_t row = 0; row < num_segments; ++row) {
    const std::int64_t* segment = segments + row * kNumSegmentColumns;
    if (segment[kNumel] < 0) refuse(row, "numel is negative");
    if (segment[kHyperRow] < 0 || static_cast<std::size_t>(segment[kHyperRow]) >= num_rows) {
      refuse(row, "hyper row " + std::to_string(segment[kHyperRow]) + " of " +
                      std::to_string(num_rows) + " rows");
    }
    numel += static_cast<std::size_t>(segment[kNumel]);
    if (segment[kNumel] == 0) continue;
    const double* values = hyper + segment[kHyperRow] * kHyperColumns;
    if (options.split) {
      check_pointer(row, "remainder", segment[kMaster], 2);
      check_pointer(row, "output", segment[kOutput], 2);
    } else {
      check_pointer(row, "master", segment[kMaster], 4);
    }
    check_pointer(row, "gradient", segment[kGradient], gradient_size);
    if (options.rule != Rule::kSgd || values[8] != 0.0) {
      check_pointer(row, "first state", segment[kState0], 4);
    }
    if (options.rule == Rule::kAdam) check_pointer(row, "second state", segment[kState1], 4);
    if (segment[kOutput] != 0 && output_size != 0) {
      check_pointer(row, "output", segment[kOutput], output_size);
    }
  }
  options.stream = numel * output_size >= kStreamBytes;
  each_piece(segments, num_segments, hyper, gradient_size, output_size, options.split,
             [&](const Piece& piece) { table_.update(piece, options); });
}

void Kernels::stream(const std::int64_t* segments, std::size_t num_segments) {
  each_piece(segments, num_segments, nullptr, 2, 2, false,
             [&](const Piece& piece) { table_.stream(piece, true); });
}

}  // namespace zp
