// The search for the scales of int4 groups, compiled for scalar.
#include "kernels/quantise_lanes.h"

namespace duck::scalar {
namespace {

struct ThisIsa {
  static constexpr size_t kRows = 4;
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
};

}  // namespace

RoundingSums quantise_int4_groups(const GroupedJob& job) { return GroupSearch<ThisIsa>::run(job); }

}  // namespace duck::scalar
