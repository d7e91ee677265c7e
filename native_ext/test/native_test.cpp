// Drives the kernels and the pool without Python, for the sanitizers. Every buffer is a heap block
// of exactly the size it needs, so that an access past its end is found; several callers share a
// handle, so that a race is.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "kernels.h"

namespace {

using zp::Dtype;

int failures = 0;
std::uint64_t digest = 0xcbf29ce484222325u;  // of every update, to be compared between machines

void add_to_digest(const std::vector<char>& bytes) {
  for (const char byte : bytes) {
    digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
}

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
}

std::size_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// A block that starts `offset` elements past an allocation.
struct Buffer {
  std::unique_ptr<char[]> bytes;
  char* data;

  Buffer(std::size_t numel, std::size_t size, std::size_t offset)
      : bytes(new char[(numel + offset) * size + (numel + offset == 0 ? 1 : 0)]()),
        data(bytes.get() + offset * size) {}
};

struct Problem {
  std::vector<std::vector<Buffer>> segments;  // [segment][master, state0, state1, gradient, output]
  std::vector<std::int64_t> table;
  std::vector<double> hyper;
  std::vector<std::size_t> sizes;
};

Problem make_problem(const std::vector<std::size_t>& sizes, Dtype gradient, Dtype output,
                     unsigned seed) {
  Problem problem;
  problem.sizes = sizes;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const std::size_t numel : sizes) {
    const std::size_t offset = random() % 5;
    std::vector<Buffer> buffers;
    for (int i = 0; i < 3; ++i) buffers.emplace_back(numel, 4, offset);
    buffers.emplace_back(numel, size_of(gradient), offset);
    buffers.emplace_back(numel, size_of(output), offset);
    for (std::size_t i = 0; i < numel; ++i) {
      const float value = normal(random);
      std::memcpy(buffers[0].data + 4 * i, &value, 4);
      if (gradient == Dtype::kFloat32) std::memcpy(buffers[3].data + 4 * i, &value, 4);
      // In split form this is the weight beside what stands where the master would: any pair with a
      // finite weight above 0 is one, while a remainder below 0 beside a weight of 0 is none.
      const auto weight = static_cast<std::uint16_t>(0x3f80u + i % 64);
      if (output == Dtype::kBfloat16) std::memcpy(buffers[4].data + 2 * i, &weight, 2);
      const auto half = static_cast<std::uint16_t>(0x3c00u + random() % 64);
      if (gradient != Dtype::kFloat32) std::memcpy(buffers[3].data + 2 * i, &half, 2);
    }
    for (const Buffer& buffer : buffers) {
      problem.table.push_back(
          static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(buffer.data)));
    }
    problem.table.push_back(static_cast<std::int64_t>(numel));
    problem.table.push_back(0);
    problem.segments.push_back(std::move(buffers));
  }
  problem.hyper = {1, 0.99, 0.01, 0.1, 0.9, 0.1, 0.5, 1e-8, -0.01, 0, 0, 0, 0, 0, 0, 0};
  return problem;
}

std::vector<char> contents(const Problem& problem, Dtype output) {
  std::vector<char> all;
  for (std::size_t row = 0; row < problem.sizes.size(); ++row) {
    for (std::size_t i = 0; i < 5; ++i) {
      const std::size_t size = i == 4 ? size_of(output) : 4;
      if (i == 3) continue;
      const char* data = problem.segments[row][i].data;
      all.insert(all.end(), data, data + problem.sizes[row] * size);
    }
  }
  return all;
}

void test_updates() {
  std::vector<std::size_t> sizes;
  for (std::size_t numel = 0; numel < 40; ++numel) sizes.push_back(numel);
  sizes.push_back(70'001);
  for (int rule = 0; rule < zp::kNumRules; ++rule) {
    for (const auto& [gradient, split] : {std::pair{Dtype::kFloat32, false},
                                          {Dtype::kBfloat16, false},
                                          {Dtype::kFloat16, false},
                                          {Dtype::kBfloat16, true}}) {
      const Dtype output = gradient == Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;
      std::vector<char> expected;
      for (const std::string& isa : zp::available_isas()) {
        for (const std::size_t threads : {1u, 3u}) {
          zp::Kernels kernels(threads, isa);
          Problem problem = make_problem(sizes, gradient, output, 7);
          const zp::UpdateOptions options{
              static_cast<zp::Rule>(rule), gradient, output, 0.5f, 1.0f, true, false, split,
              zp::Moments::kFloat32,       false};
          for (int step = 0; step < 2; ++step) {
            kernels.update(problem.table.data(), sizes.size(), problem.hyper.data(), 1, nullptr,
                           nullptr, options);
          }
          const std::vector<char> result = contents(problem, output);
          if (expected.empty()) {
            expected = result;
            add_to_digest(result);
          }
          expect(result == expected, "update " + std::to_string(rule) + " on " + isa);
        }
      }
    }
  }
}

// States below fp32, each beside its exponents in a block of exactly its size.
struct SmallProblem {
  Problem problem;
  std::vector<std::vector<Buffer>> states;  // [segment][state0, state1, exponents0, exponents1]
  std::vector<std::int64_t> places;
};

SmallProblem make_small_problem(const std::vector<std::size_t>& sizes, Dtype gradient, Dtype output,
                                zp::Moments moments) {
  SmallProblem made{make_problem(sizes, gradient, output, 7), {}, {}};
  const std::size_t size = moments == zp::Moments::kBytes ? 1 : 2;
  const auto address = [](const Buffer& buffer) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(buffer.data));
  };
  for (std::size_t row = 0; row < sizes.size(); ++row) {
    std::vector<Buffer> own;
    for (int i = 0; i < 2; ++i) own.emplace_back(sizes[row], size, row % 5);
    for (int i = 0; i < 2; ++i) {
      own.emplace_back((sizes[row] + zp::kGroup - 1) / zp::kGroup, 1, row % 3);
    }
    made.problem.table[row * zp::kNumSegmentColumns + zp::kState0] = address(own[0]);
    made.problem.table[row * zp::kNumSegmentColumns + zp::kState1] = address(own[1]);
    const auto first = static_cast<std::int64_t>(row * zp::kGroup);
    made.places.insert(made.places.end(), {3, first, address(own[2]), address(own[3])});
    made.states.push_back(std::move(own));
  }
  return made;
}

void test_small_states() {
  std::vector<std::size_t> sizes;
  for (std::size_t numel = 0; numel < 70; ++numel) sizes.push_back(numel);
  sizes.push_back(70'001);
  for (int rule = 0; rule < zp::kNumRules; ++rule) {
    for (const zp::Moments moments : {zp::Moments::kBfloat16, zp::Moments::kBytes}) {
      for (const bool split : {false, true}) {
        std::vector<char> expected;
        for (const std::string& isa : zp::available_isas()) {
          for (const std::size_t threads : {1u, 3u}) {
            zp::Kernels kernels(threads, isa);
            SmallProblem small =
                make_small_problem(sizes, Dtype::kBfloat16, Dtype::kBfloat16, moments);
            zp::UpdateOptions options{};
            options.rule = static_cast<zp::Rule>(rule);
            options.gradient_dtype = options.output_dtype = Dtype::kBfloat16;
            options.scale = 0.5f;
            options.split = split;
            options.moments = moments;
            for (int step = 0; step < 2; ++step) {
              small.problem.hyper[zp::kStepColumn] = step + 1;
              kernels.update(small.problem.table.data(), sizes.size(), small.problem.hyper.data(),
                             1, small.places.data(), nullptr, options);
            }
            std::vector<char> result = contents(small.problem, Dtype::kBfloat16);
            for (std::size_t row = 0; row < sizes.size(); ++row) {
              for (std::size_t i = 0; i < 4; ++i) {
                const std::size_t groups = (sizes[row] + zp::kGroup - 1) / zp::kGroup;
                const std::size_t width = moments == zp::Moments::kBytes ? 1 : 2;
                const char* data = small.states[row][i].data;
                result.insert(result.end(), data, data + (i < 2 ? sizes[row] * width : groups));
              }
            }
            if (expected.empty()) {
              expected = result;
              add_to_digest(result);
            }
            expect(result == expected,
                   "small states of rule " + std::to_string(rule) + " on " + isa);
          }
        }
      }
    }
  }
}

// An update that reads one set of master and states and writes another gives what it gives in
// place, and leaves what it reads as it is; also where it is large enough to be written past the
// caches, from every place in a line.
void test_updates_apart() {
  for (int rule = 0; rule < zp::kNumRules; ++rule) {
    for (const Dtype output : {Dtype::kNone, Dtype::kBfloat16}) {
      // One rule is enough for what is large: under the sanitizers it takes long.
      const std::vector<std::size_t> sizes{1, 17, 64, 3'001, rule == 0 ? 1'050'003u : 127u};
      for (const std::string& isa : zp::available_isas()) {
        zp::Kernels kernels(3, isa);
        const Dtype stored = Dtype::kBfloat16;
        Problem expected = make_problem(sizes, Dtype::kFloat32, stored, 5);
        Problem from = make_problem(sizes, Dtype::kFloat32, stored, 5);
        Problem to = make_problem(sizes, Dtype::kFloat32, stored, 6);
        std::vector<std::int64_t> sources;
        for (std::size_t row = 0; row < sizes.size(); ++row) {
          const std::int64_t* source = from.table.data() + row * zp::kNumSegmentColumns;
          std::int64_t* target = to.table.data() + row * zp::kNumSegmentColumns;
          sources.insert(sources.end(), {source[0], source[1], source[2]});
          target[zp::kGradient] = source[zp::kGradient];
        }
        const std::vector<char> before = contents(from, stored);
        const zp::UpdateOptions options{static_cast<zp::Rule>(rule),
                                        Dtype::kFloat32,
                                        output,
                                        1.0f,
                                        0.0f,
                                        false,
                                        false,
                                        false,
                                        zp::Moments::kFloat32,
                                        false};
        kernels.update(expected.table.data(), sizes.size(), expected.hyper.data(), 1, nullptr,
                       nullptr, options);
        kernels.update(to.table.data(), sizes.size(), to.hyper.data(), 1, nullptr, sources.data(),
                       options);
        expect(contents(from, stored) == before, "an update apart leaves what it reads");
        for (std::size_t row = 0; row < sizes.size(); ++row) {
          const int states = rule == 0 ? 2 : 1;
          for (int part = 0; part < 5; ++part) {
            if (part == 3 || (part < 3 && part > states)) continue;
            if (part == 4 && output == Dtype::kNone) continue;
            const std::size_t bytes = sizes[row] * (part == 4 ? 2u : 4u);
            const char* wanted = expected.segments[row][static_cast<std::size_t>(part)].data;
            const char* found = to.segments[row][static_cast<std::size_t>(part)].data;
            expect(std::memcmp(wanted, found, bytes) == 0,
                   "update " + std::to_string(rule) + " apart on " + isa);
          }
        }
      }
    }
  }
}

void test_elementwise() {
  for (const std::string& isa : zp::available_isas()) {
    zp::Kernels kernels(2, isa);
    // The last one is written past the caches.
    for (const std::size_t numel : {0u, 1u, 5u, 31u, 33u, 1000u, 1'100'003u}) {
      for (const Dtype source : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
        for (const Dtype destination : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
          const Buffer from(numel, size_of(source), 1);
          const Buffer to(numel, size_of(destination), 3);
          kernels.copy(to.data, destination, from.data, source, numel);
          kernels.sum_ranks(to.data, destination, {from.data, from.data}, {source, source}, 2.0f,
                            numel);
        }
        const Buffer from(numel, size_of(source), 1);
        const Buffer total(numel, 4, 1);
        kernels.accumulate(reinterpret_cast<float*>(total.data), from.data, source, numel);
        const zp::NormState state = kernels.norm_partial(from.data, source, numel);
        expect(state.nonfinite == 0 && state.absmax_bits == 0, "norm of zeros");
      }
    }
    // 3^2 x 1000 in units of 2^-298.
    std::vector<float> threes(1000, -3.0f);
    const zp::NormState state = kernels.norm_partial(threes.data(), Dtype::kFloat32, threes.size());
    expect(state.limbs[4] == std::uint64_t{9000} << 42, "norm of threes on " + isa);
  }
}

void test_stream() {
  zp::Kernels kernels(2, "auto");
  Problem problem = make_problem({50'001, 3, 0, 17}, Dtype::kBfloat16, Dtype::kBfloat16, 3);
  const std::vector<char> before = contents(problem, Dtype::kBfloat16);
  kernels.stream(problem.table.data(), problem.sizes.size());
  expect(contents(problem, Dtype::kBfloat16) != before, "stream changes values");
}

void test_callers_share_a_handle() {
  zp::Kernels kernels(3, "auto");
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&kernels] {
      std::vector<float> total(60'000, 0.0f);
      const std::vector<float> one(60'000, 1.0f);
      for (int turn = 0; turn < 20; ++turn) {
        kernels.accumulate(total.data(), one.data(), Dtype::kFloat32, total.size());
      }
      for (const float value : total) {
        if (value != 20.0f) std::abort();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void test_refusals() {
  zp::Kernels kernels(2, "auto");
  kernels.close();
  kernels.close();
  float value = 1.0f;
  try {
    kernels.accumulate(&value, &value, Dtype::kFloat32, 1);
    expect(false, "a closed handle refuses");
  } catch (const std::runtime_error&) {
  }
  try {
    zp::Kernels other(1, "no such thing");
    expect(false, "an unknown instruction set is refused");
  } catch (const std::invalid_argument&) {
  }
}

void test_start_and_stop() {
  for (int turn = 0; turn < 50; ++turn) {
    zp::Kernels kernels(4, "auto");
    if (turn % 2 == 0) {
      std::vector<float> total(70'000, 0.0f);
      kernels.accumulate(total.data(), total.data(), Dtype::kFloat32, total.size());
    }
  }
}

}  // namespace

int main() {
  test_updates();
  test_updates_apart();
  test_small_states();
  test_elementwise();
  test_stream();
  test_callers_share_a_handle();
  test_refusals();
  test_start_and_stop();
  std::printf("digest %016llx\n", static_cast<unsigned long long>(digest));
  std::printf("%s\n", failures == 0 ? "all native tests passed" : "native tests failed");
  return failures == 0 ? 0 : 1;
}
