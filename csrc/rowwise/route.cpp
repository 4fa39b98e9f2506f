// The router's choice: see route.h.
#include "rowwise/route.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace duck {
namespace {

bool is_nan(float value) { return value != value; }

// Whether `a` is chosen before `b`, which has the lower number.
bool goes_before(float a, float b) { return a > b || (is_nan(a) && !is_nan(b)); }

// The numbers of the `count` best of values, best first. best: scratch of as many.
void choose(const float* values, uint32_t size, uint32_t count, int32_t* ids, float* best) {
  uint32_t chosen = 0;
  for (uint32_t i = 0; i < size; ++i) {
    const float value = values[i];
    if (chosen == count) {
      if (value <= best[count - 1]) continue;  // what nearly all of many do
      if (!goes_before(value, best[count - 1])) continue;
    } else {
      ++chosen;
    }
    uint32_t place = chosen - 1;
    for (; place > 0 && goes_before(value, best[place - 1]); --place) {
      best[place] = best[place - 1];
      ids[place] = ids[place - 1];
    }
    best[place] = value;
    ids[place] = static_cast<int32_t>(i);
  }
}

// Scratch of one call.
struct Choice {
  explicit Choice(const Routing& routing)
      : scores(routing.num_experts),
        choice(routing.num_experts),
        group_scores(routing.num_groups),
        best(std::max({routing.top_k, routing.topk_group, 2u})),
        groups(std::max(routing.topk_group, 2u)) {}

  std::vector<float> scores, choice, group_scores, best;
  std::vector<int32_t> groups;

  // Leaves minus infinity at the experts of all groups but the best.
  void limit_groups(const Routing& routing) {
    const uint32_t size = routing.num_experts / routing.num_groups;
    for (uint32_t group = 0; group < routing.num_groups; ++group) {
      const uint32_t num_best = std::min(2u, size);
      choose(choice.data() + group * size, size, num_best, groups.data(), best.data());
      group_scores[group] = num_best == 2 ? best[0] + best[1] : best[0];
    }
    choose(group_scores.data(), routing.num_groups, routing.topk_group, groups.data(), best.data());
    const auto end = groups.begin() + routing.topk_group;
    for (uint32_t group = 0; group < routing.num_groups; ++group) {
      if (std::find(groups.begin(), end, static_cast<int32_t>(group)) != end) continue;
      std::fill_n(choice.begin() + group * size, size, -std::numeric_limits<float>::infinity());
    }
  }
};

}  // namespace

void route(const RowKernels& kernels, const Routing& routing, const float* logits, const float* bias,
           size_t num_rows, int32_t* topk_ids, float* topk_weights) {
  Choice scratch(routing);
  float* scores = scratch.scores.data();
  const auto score = routing.scores == Scores::kSigmoid ? kernels.sigmoid : kernels.softmax;
  for (size_t row = 0; row < num_rows; ++row) {
    score(logits + row * routing.num_experts, routing.num_experts, scores);
    for (uint32_t e = 0; e < routing.num_experts; ++e) {
      scratch.choice[e] = bias != nullptr ? scores[e] + bias[e] : scores[e];
    }
    if (routing.topk_group < routing.num_groups) scratch.limit_groups(routing);
    int32_t* ids = topk_ids + row * routing.top_k;
    float* weights = topk_weights + row * routing.top_k;
    choose(scratch.choice.data(), routing.num_experts, routing.top_k, ids, scratch.best.data());
    float total = 0.0f;
    for (uint32_t k = 0; k < routing.top_k; ++k) total += weights[k] = scores[ids[k]];
    const float divisor = routing.normalize ? total + 1e-20f : 1.0f;
    for (uint32_t k = 0; k < routing.top_k; ++k) weights[k] = weights[k] / divisor * routing.scaling_factor;
  }
}

}  // namespace duck
