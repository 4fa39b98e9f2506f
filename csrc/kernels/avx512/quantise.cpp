// The search for the scales of int4 groups, compiled for avx512.
#include "kernels/quantise_lanes.h"

namespace duck::avx512 {
namespace {

struct ThisIsa {
  static constexpr size_t kRows = 16;
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
};

}  // namespace

RoundingSums quantise_int4_groups(const GroupedJob& job) { return GroupSearch<ThisIsa>::run(job); }

}  // namespace duck::avx512
