// One row's expert step with the kernels of a Variant: the course of kernels/experts.cpp for few rows, so
// that production's kernels take the same time here as there. Used by module.cpp.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "ablation/variants.h"
#include "kernels/experts_impl.h"

namespace duck::ablation {

// Which units a step reads: fp9 units [E, S, unit_bytes].
struct Layer {
  const uint8_t* base;
  size_t expert_bytes;
};

class DecodeStep {
 public:
  // hidden_size a multiple of 128.
  DecodeStep(uint32_t hidden_size, uint32_t num_stripes, uint32_t max_experts, Isa isa, ThreadPool& pool);

  // y [H] = sum over k of weights[k] * expert ids[k] of x [H]; ids differ from each other. Units in the
  // variant's layout.
  void run(const Variant& variant, const Layer& layer, const int32_t* ids, const float* weights,
           uint32_t num_experts, const float* x, float* y);

 private:
  Unit unit(size_t index, uint32_t stripe) const;
  Unit unit_after(size_t index, uint32_t stripe) const;
  void work(int thread);
  void gate_up_part(uint64_t item);
  void run_down(int thread);

  const uint32_t hidden_size_, num_stripes_, num_records_, num_parts_;
  const uint32_t production_prefetch_bytes_ = prefetch_bytes();  // asks the CPU, which takes microseconds
  const KernelTable& table_;
  const FormatKernels& production_;
  ThreadPool& pool_;
  FloatBuffer scaled_x_, activations_, partial_dots_;
  std::vector<std::atomic<uint32_t>> parts_left_;
  WorkRanges items_;
  const std::function<void(int)> work_;

  const Variant* variant_ = nullptr;
  decltype(FormatKernels::dots2) dots2_ = nullptr;
  FormatKernels::Down down_ = nullptr;
  uint32_t prefetch_bytes_ = 0;
  Layer layer_{};
  std::vector<std::pair<int32_t, float>> experts_;  // ascending
  const float* x_ = nullptr;
  float* y_ = nullptr;
};

}  // namespace duck::ablation
