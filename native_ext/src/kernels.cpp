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

std::size_t size_of(Moments moments) {
  return moments == Moments::kFloat32 ? 4 : moments == Moments::kBfloat16 ? 2 : 1;
}

// The nearest place at or after `offset` at which a segment may be cut.
std::size_t cut_at(std::size_t offset, std::size_t numel, Moments moments) {
  if (moments != Moments::kBytes) return offset;
  return std::min((offset + kGroup - 1) / kGroup * kGroup, numel);
}

// Splitmix64 (Steele, Lea and Flood, 2014): two words that tell parameters and steps apart.
std::uint64_t key_of(std::uint64_t parameter, std::uint64_t step) {
  std::uint64_t key = (parameter << 32 ^ step) + 0x9e3779b97f4a7c15u;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
  key = (key ^ key >> 27) * 0x94d049bb133111ebu;
  return key ^ key >> 31;
}

// What a piece needs where its states are not floats.
void place_piece(Piece& piece, const std::int64_t* place, std::size_t offset) {
  const auto step = static_cast<std::uint64_t>(piece.hyper[kStepColumn]);
  const std::uint64_t key = key_of(static_cast<std::uint64_t>(place[kParameter]), step);
  piece.key[0] = static_cast<std::uint32_t>(key);
  piece.key[1] = static_cast<std::uint32_t>(key >> 32);
  piece.first = static_cast<std::uint32_t>(static_cast<std::uint64_t>(place[kFirst]) + offset);
  piece.exponents0 = shifted(pointer<std::uint8_t>(place[kExponents0]), offset / kGroup);
  piece.exponents1 = shifted(pointer<std::uint8_t>(place[kExponents1]), offset / kGroup);
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

void check_place(std::size_t row, const std::int64_t* place, PlaceColumn exponents) {
  if (place[exponents] == 0) refuse(row, "exponents pointer is null");
  if (place[kFirst] % kGroup != 0) {
    refuse(row, "first element " + std::to_string(place[kFirst]) + " is inside a group of " +
                    std::to_string(kGroup));
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
                         const double* hyper, const std::int64_t* places,
                         const std::int64_t* sources, const UpdateOptions& options,
                         const std::function<void(const Piece&)>& body) {
  const std::size_t gradient_size = size_of(options.gradient_dtype);
  const std::size_t output_size = size_of(options.output_dtype);
  const std::size_t state_size = size_of(options.moments);
  const bool split = options.split;
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
      const std::size_t offset = cut_at(at - begin, numel, options.moments);
      at = std::min(ends[row], stop);
      const std::size_t part = cut_at(at - begin, numel, options.moments) - offset;
      if (part != 0) {
        // Several small segments, or the next large one.
        const std::size_t horizon = std::min(stop, ends[row] + kPrefetchAhead);
        for (; ahead < num_segments && ends[ahead - 1] < horizon; ++ahead) {
          prefetch_segment(segments + ahead * kNumSegmentColumns);
        }
        Piece piece{
            .master = split ? nullptr : shifted(pointer<float>(segment[kMaster]), offset),
            .remainder =
                split ? shifted(pointer<std::uint16_t>(segment[kMaster]), offset) : nullptr,
            .state0 = shifted(pointer<char>(segment[kState0]), offset * state_size),
            .state1 = shifted(pointer<char>(segment[kState1]), offset * state_size),
            .gradient = shifted(pointer<const char>(segment[kGradient]), offset * gradient_size),
            .output = shifted(pointer<char>(segment[kOutput]), offset * output_size),
            .numel = part,
            .hyper = hyper == nullptr ? nullptr : hyper + segment[kHyperRow] * kHyperColumns,
            .exponents0 = nullptr,
            .exponents1 = nullptr,
            .first = 0,
            .key = {0, 0},
            .from_master = nullptr,
            .from_state0 = nullptr,
            .from_state1 = nullptr,
        };
        if (sources != nullptr) {
          const std::int64_t* source = sources + row * kNumSourceColumns;
          const std::size_t bytes = offset * state_size;
          piece.from_master = shifted(pointer<const float>(source[kFromMaster]), offset);
          piece.from_state0 = shifted(pointer<const char>(source[kFromState0]), bytes);
          piece.from_state1 = shifted(pointer<const char>(source[kFromState1]), bytes);
        }
        if (places != nullptr) place_piece(piece, places + row * kNumPlaceColumns, offset);
        body(piece);
      }
      ++row;
    }
  });
}

void Kernels::update(const std::int64_t* segments, std::size_t num_segments, const double* hyper,
                     std::size_t num_rows, const std::int64_t* places, const std::int64_t* sources,
                     UpdateOptions options) {
  const std::size_t gradient_size = size_of(options.gradient_dtype);
  const std::size_t output_size = size_of(options.output_dtype);
  if (options.split && options.output_dtype != Dtype::kBfloat16) {
    throw std::invalid_argument("the split form needs bf16 outputs: they are half of the master");
  }
  if (num_segments != 0 && options.moments != Moments::kFloat32 && places == nullptr) {
    throw std::invalid_argument("states below fp32 need a table of places");
  }
  options.apart = sources != nullptr;
  if (options.apart && (options.split || options.moments != Moments::kFloat32)) {
    throw std::invalid_argument("split masters and states below fp32 are updated in place only");
  }
  const std::size_t state_size = size_of(options.moments);
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
    const bool bytes = options.moments == Moments::kBytes;
    const std::int64_t* source = options.apart ? sources + row * kNumSourceColumns : nullptr;
    if (source != nullptr) check_pointer(row, "old master", source[kFromMaster], 4);
    if (options.rule != Rule::kSgd || values[8] != 0.0) {
      check_pointer(row, "first state", segment[kState0], state_size);
      if (source != nullptr) {
        check_pointer(row, "old first state", source[kFromState0], state_size);
      }
      if (bytes) check_place(row, places + row * kNumPlaceColumns, kExponents0);
    }
    if (options.rule == Rule::kAdam) {
      check_pointer(row, "second state", segment[kState1], state_size);
      if (source != nullptr) {
        check_pointer(row, "old second state", source[kFromState1], state_size);
      }
      if (bytes) check_place(row, places + row * kNumPlaceColumns, kExponents1);
    }
    if (segment[kOutput] != 0 && output_size != 0) {
      check_pointer(row, "output", segment[kOutput], output_size);
    }
  }
  // An update apart writes what it has not read, of which the master is 4 bytes an element.
  options.stream = numel * (options.apart ? 4 : output_size) >= kStreamBytes;
  each_piece(segments, num_segments, hyper, places, sources, options,
             [&](const Piece& piece) { table_.update(piece, options); });
}

void Kernels::stream(const std::int64_t* segments, std::size_t num_segments) {
  UpdateOptions options{};
  options.gradient_dtype = options.output_dtype = Dtype::kBfloat16;
  each_piece(segments, num_segments, nullptr, nullptr, nullptr, options,
             [&](const Piece& piece) { table_.stream(piece, true); });
}

}  // namespace zp
