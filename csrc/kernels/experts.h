// The routed-expert function of one slice, for T rows: what a worker computes in a step, and what the
// in-process experts compute. Called by worker/step_loop.cpp and kernels/bind.cpp; knows no network.
//
//   y[t] = sum over k of topk_weights[t, k] * down_e( silu(gate_e x[t]) * (up_e x[t]) ),  e = topk_ids[t, k]
//
// restricted to the channels of the slice. A row's result depends on that row, the weights, the ISA and
// nothing else: neither on the other rows, nor on the number of threads, nor on whether the weights are fp9
// or fp8. An id that a row names twice counts once, with the sum of the two weights.
//
// Order of summation, fp9 and fp8. gate and up: 128 hidden indices (a block) at a time, even and odd ones in
// a chain of their own, each ascending; the sum of the two times the block's scale is added to those of the
// eight blocks that make a part; parts are added in ascending order. down: for each output, experts in
// ascending id, for each of them the slice's stripes in ascending order: even and odd channels in a chain of
// their own; the sum of the two times the block's scale is added. Where each row of a matrix has a scale
// (ScaleLayout::kChannel), gate's and up's whole sum is multiplied by its channel's scale instead, and down's
// sums by the output's.
//
// Bound. With u = 2^-24, n = min(H, 128), B = ceil(H / 128), N = K * S, and G, U, D the sums of the absolute
// terms of gate, up and down (scales included), e(v) the error of v, to first order in u:
//   e(gate) <= (n / 2 + min(B, 8) + ceil(B / 8) + 4) u G, likewise e(up);
//   e(a) <= |weight| ((1.1 e(gate) + 6u |silu|) (|up| + e(up)) + |silu| e(up)) + 4u |a| + 2^-50;
//   e(y) <= (N + 12) u D + sum |down| e(a).
// silu itself is within 3 ulp (2.3 measured) of the exact function. tests/kernels/expert_reference.py
// computes this bound and the tests hold every ISA to it.
//
// Prefill in bf16, where that was asked for. In a step, experts of more than eight rows (kMaxDirectRows) take
// x and the activations rounded to bf16, to nearest, ties to even; the weights are exact in bf16, products
// exact, sums f32. So a row's bits then also depend on whether its expert has more than eight rows in the
// step, and on the multipliers (AVX512-BF16 or AMX-BF16), but on nothing else of the above. The order in
// those experts: gate and up: blocks and parts as above, the products of a block in an order of the
// instruction's own; down: for each output and expert, its stripes of one scale block (of 128 channels) at a
// time, a sum like a block's times the scale. The bound for such an expert, with v = 2^-8 (a bf16 has 8
// significant bits), m = min(128, 16 S) and M = ceil(S / 8) + 1 blocks of stripes, N = K * M:
//   e(gate) <= (v + (n + min(B, 8) + ceil(B / 8) + 4) (1 + v) u) G, likewise e(up);
//   e(a) as above plus v (|a| + e(a)), with e(a) from these e(gate), e(up);
//   e(y) <= (m + N + 12) u D + sum |down| e(a), with D from |a| + e(a).
// Scales by row change neither the blocks nor the bound.
// This is the worst case; the errors of random values mostly cancel, docs/performance.md says how far. The
// multipliers take denormals for zero; in the ranges below they see none.
//
// int8, int4 and mxfp4. x is rounded to bytes in groups of 32 hidden indices, the activations in groups of a
// stripe's 16: the scale is the group's largest magnitude / 127, a byte is value * (127 / that magnitude),
// rounded to nearest, ties to even. A group's products with the codes, less the zero points, are added in
// integers, without error. gate and up: a group's sum times (scale of x * scale of the weights) joins one
// chain over the 32 groups of a part, each with one FMA; parts are added in ascending order. down: for each
// output, experts in ascending id and stripes in ascending order join one chain likewise. (With scales by
// channel gate's and up's come last.) A row's bits are then the same on every ISA, too. With r = 1 / 254 +
// 2^-22 and X, A the sums over a weight's row of |weight| times the largest magnitude of the value's group,
// B' = ceil(H / 32), to first order in u:
//   e(gate) <= r X + (min(B', 32) + ceil(B' / 32) + 5) u G, likewise e(up);
//   e(a) as above, from these;
//   e(y) <= (N + 5) u D + r A + sum |down| e(a).
// These are worst cases: random values are about 1 % off in the L2 norm, for x and activations together
// (docs/performance.md). With Activations::kF32 nothing is rounded to bytes: codes are decoded to f32
// and the order and the bound are those of fp9.
//
// Ranges in which no denormal number but an e4m3 subnormal of fp8 enters an addition or a product, and none
// leaves one: |x| is 0 or in [2^-40, 2^47); scales are 0 or in [2^-21, 2^40] (gate and up: also smaller ones
// while |x| * scale >= 2^-71); |topk_weights| is 0 or in [2^-40, 2^40]; activations |silu(gate) * up *
// weight| and |silu(gate) * up| are below 2^47 (2^63 for fp9, as for x). An activation below 2^-50 counts as
// zero (the one place where a product may underflow first, below 2^-190). Smaller x lose accuracy gradually;
// what is larger becomes infinite or NaN. NaN and infinity in x come out in that row alone. run() computes
// with denormals on, whatever the caller has set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/weight_format.h"

namespace duck {

class ThreadPool;

enum class Isa : uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512"

// The best ISA that this CPU and OS offer, or the one that DUCK_FORCE_ISA names.
// Throws std::invalid_argument when the variable names no ISA, or one that this CPU lacks.
Isa select_isa();

bool isa_available(Isa isa);        // by this CPU and by its operating system
std::vector<Isa> available_isas();  // from the slowest to the best; scalar is always there
// The ISA of that name. Throws std::invalid_argument, naming `field`, where there is none or this machine
// lacks it.
Isa parse_isa(const std::string& field, const std::string& name);

// What experts of more than eight rows in a step are computed with.
enum class Prefill : uint8_t { kF32 = 0, kBf16 = 1 };

// Throws std::invalid_argument for another name than "f32" and "bf16".
Prefill parse_prefill(const std::string& name);

// What int8, int4 and mxfp4 are multiplied with: x and the activations rounded to bytes, or as they are in
// f32 (slow, for tests and for judging the rounding).
enum class Activations : uint8_t { kInt8 = 0, kF32 = 1 };

// Throws std::invalid_argument for another name than "int8" and "f32".
Activations parse_activations(const std::string& name);

enum class ActivationType : uint8_t { kF32 = 0, kBf16 = 1 };

struct ExpertShape {
  uint32_t hidden_size = 0;        // H
  uint32_t intermediate_size = 0;  // I of the whole expert, not of the slice
  uint32_t num_experts = 0;        // E
  uint32_t top_k = 0;              // K, most ids per row
  uint32_t first_stripe = 0;       // the slice: stripes [first_stripe, first_stripe + num_stripes)
  uint32_t num_stripes = 0;        // S
};

// The shape, if it makes sense. Throws std::invalid_argument: zero or absurd sizes, a slice outside the
// expert.
ExpertShape checked_shape(const ExpertShape& shape, uint32_t max_tokens);
[[noreturn]] void fail_shape(const std::string& field, uint64_t got, const std::string& expected);

// The format of experts of that name, "fp9" or "fp8"; "fp8-normal" decodes fp8 without denormal numbers on
// any CPU, for tests. Throws std::invalid_argument for another.
WeightFormat parse_format(const std::string& name);
// The layout of scales of that name, "block" or "channel". Throws std::invalid_argument for another.
ScaleLayout parse_scale_layout(const std::string& name);

// Units of one layer in memory: unit(e, s) = base + e * expert_stride_bytes + s * stripe_stride_bytes, where
// s counts from the slice's first stripe. An expert file has an expert's stripes one behind the other, shards
// have a stripe's experts. No alignment is needed; 64 bytes is best. Layers of one model may differ in
// format.
struct LayerUnits {
  const uint8_t* base = nullptr;
  size_t expert_stride_bytes = 0;
  size_t stripe_stride_bytes = 0;
  WeightFormat format = WeightFormat::kFp9;        // one that experts come in
  ScaleLayout scale_layout = ScaleLayout::kBlock;  // kGroup is understood for the formats that have groups
};

struct StepRows {
  uint32_t num_tokens = 0;  // T
  uint32_t top_k = 0;       // ids per row, <= shape.top_k
  ActivationType x_type = ActivationType::kF32;
  const void* x = nullptr;              // [T, H] f32 or bf16, no alignment needed
  const int32_t* topk_ids = nullptr;    // [T, K]
  const float* topk_weights = nullptr;  // [T, K]
};

// What a worker's step loop computes: Experts, or a stand-in for them (simulate/stand_in.h).
class StepCompute {
 public:
  virtual ~StepCompute() = default;
  virtual const ExpertShape& shape() const = 0;
  // As Experts::run().
  virtual void run(const LayerUnits& layer, const StepRows& rows, float* y) = 0;
};

// The expert function with its scratch memory, sized at construction for max_tokens rows.
class Experts final : public StepCompute {
 public:
  static constexpr uint32_t kChunkRows = 48;  // rows of an expert that the tile kernels take at once

  // Throws std::invalid_argument as checked_shape does, or when this machine lacks the ISA.
  // Prefill::kBf16: also where it has no bf16 multipliers, as select_bf16() says.
  Experts(const ExpertShape& shape, uint32_t max_tokens, Isa isa, ThreadPool& pool,
          Prefill prefill = Prefill::kF32, Activations activations = Activations::kInt8);
  ~Experts() override;
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;

  // Writes the partial sums y [T, H] f32. Throws std::invalid_argument (naming field, got, expected) for
  // T > max_tokens, top_k > shape.top_k, an id outside [0, E), or a format that experts do not come in; y is
  // then untouched.
  void run(const LayerUnits& layer, const StepRows& rows, float* y) override;

  // Reads the units that run() would read for these ids, each once, on the same threads, and computes
  // nothing: the ceiling that a step is measured against. Returns the exclusive or of their 64-bit words.
  // Throws as run() does.
  uint64_t read_units(const LayerUnits& layer, const StepRows& rows);

  const ExpertShape& shape() const override;
  Isa isa() const;
  const char* prefill() const;  // "f32", or the name of the bf16 multipliers
  const char* integer() const;  // name of the multipliers of int8, int4 and mxfp4

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace duck
