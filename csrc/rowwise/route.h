// The router behind its matrix: which experts a token goes to, and with what weights. Called by
// rowwise/bind.cpp. A token's choice depends on its own logits alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rowwise/row_kernels.h"

namespace duck {

enum class Scores : uint8_t { kSigmoid = 0, kSoftmax = 1 };

struct Routing {
  Scores scores = Scores::kSigmoid;
  uint32_t num_experts = 0;  // E
  uint32_t top_k = 0;        // K, at most E
  uint32_t num_groups = 1;   // E / num_groups experts each
  uint32_t topk_group = 1;   // groups that a token may use
  bool normalize = false;    // the chosen scores are divided by their sum
  float scaling_factor = 1.0f;
};

// The experts of each token, best first, and their weights.
//
// The K best of score + bias among the topk_group best groups; a group's score is the sum of its two best
// experts'. Among equal numbers the lowest expert, or group, wins; NaN comes first. A weight is an expert's
// score without the bias, divided by their sum (plus 1e-20, added in the order of the choice) if asked for,
// times scaling_factor.
//
// logits: [T, E]. bias: [E], or null. topk_ids, topk_weights: [T, K].
void route(const RowKernels& kernels, const Routing& routing, const float* logits, const float* bias,
           size_t num_rows, int32_t* topk_ids, float* topk_weights);

}  // namespace duck
