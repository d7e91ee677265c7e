// Plain types shared by the dispatcher and by the bodies compiled for each instruction set. This
// header holds no inline function with linkage, so that code compiled for a newer instruction set
// can never be chosen by the linker to run on an older machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zp {

enum class Dtype : int { kNone = -1, kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

enum class Rule : int { kAdam = 0, kAdagrad = 1, kLion = 2, kSgd = 3 };
inline constexpr int kNumRules = 4;

// Columns of the segment table; the table itself is int64.
enum SegmentColumn : int {
  kMaster = 0,  // split: the remainder
  kState0,
  kState1,
  kGradient,
  kOutput,
  kNumel,
  kHyperRow,
  kNumSegmentColumns
};

// How an update's states are kept: as floats, as bf16 rounded stochastically, or as 8-bit numbers
// with one exponent byte for each kGroup of them (see small.inc).
enum class Moments : int { kFloat32 = 0, kBfloat16 = 1, kBytes = 2 };
inline constexpr int kGroup = 16;

// Columns of the table beside the segments that states below fp32 need; int64.
enum PlaceColumn : int {
  kParameter = 0,  // which parameter it is, for the random bits
  kFirst,          // the segment's first element in the parameter, a multiple of kGroup for bytes
  kExponents0,     // addresses of the exponents of bytes
  kExponents1,
  kNumPlaceColumns
};

// Columns of the table of what the update reads where it does not update in place; int64 addresses.
enum SourceColumn : int { kFromMaster = 0, kFromState0, kFromState1, kNumSourceColumns };

// Columns of a hyper row (float64). Each rule reads its own; see zero_plugin/optim/rule.py.
inline constexpr int kHyperColumns = 16;
inline constexpr int kStepColumn = 9;  // of any rule: number of the step

// A part of one segment, all pointers already moved to its first element.
struct Piece {
  float* master;
  // In place of the master where the update is in split form: what it leaves out of its weight.
  std::uint16_t* remainder;
  void* state0;  // float, bf16 or bytes
  void* state1;
  const void* gradient;
  void* output;  // null: nothing is written but master and states; split: the weight, read too
  std::size_t numel;
  const double* hyper;
  // Where states are not floats.
  std::uint8_t* exponents0;
  std::uint8_t* exponents1;
  std::uint32_t first;   // this piece's first element in its parameter, modulo 2^32
  std::uint32_t key[2];  // of the parameter and the step
  // What master and states are read from where the update is apart.
  const float* from_master;
  const void* from_state0;
  const void* from_state1;
};

struct UpdateOptions {
  Rule rule;
  Dtype gradient_dtype;
  Dtype output_dtype;
  float scale;
  float clip_value;  // used when clip is true
  bool clip;
  bool stream;  // write outputs past the caches
  bool split;   // a master is a bf16 weight (the output) and a remainder
  Moments moments;
  bool apart;  // master and states are read from other memory than they are written to
};

// Exact sum of squares as an integer in units of 2^-298, the square of the smallest float. The
// largest square is below 2^256, so 640 bits leave room for 2^85 elements.
inline constexpr int kNormLimbs = 10;

struct NormState {
  std::uint64_t limbs[kNormLimbs];
  std::uint32_t absmax_bits;  // ordered like the absolute values: finite < inf < nan
  std::uint64_t nonfinite;
};

struct KernelTable {
  const char* name;
  void (*convert)(void* destination, Dtype destination_dtype, const void* source,
                  Dtype source_dtype, std::size_t numel, bool stream);
  void (*accumulate)(float* destination, const void* source, Dtype source_dtype, std::size_t numel);
  void (*sum_ranks)(void* destination, Dtype destination_dtype, const void* const* parts,
                    const Dtype* part_dtypes, std::size_t num_parts, float divisor,
                    std::size_t numel, bool stream);
  void (*norm)(const void* source, Dtype dtype, std::size_t numel, NormState* state);
  void (*update)(const Piece& piece, const UpdateOptions& options);
  void (*stream)(const Piece& piece, bool stream);
};

}  // namespace zp
