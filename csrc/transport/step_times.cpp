#include "transport/step_times.h"

#include <algorithm>

namespace duck {
namespace {

constexpr float kNewestWeight = 1.0f / 32;

float us_between(wire::Clock::time_point from, wire::Clock::time_point to) {
  return std::max(0.0f, std::chrono::duration<float, std::micro>(to - from).count());
}

}  // namespace

void StepTimes::record(uint32_t layer, uint32_t num_tokens, wire::Clock::time_point submitted,
                       wire::Clock::time_point waited_from, const std::vector<Answer>& answers) {
  const std::lock_guard lock(mutex_);
  auto found =
      std::find_if(layers_.begin(), layers_.end(), [layer](const auto& each) { return each.layer == layer; });
  if (found == layers_.end()) {
    if (layers_.size() == kMaxLayers) return;
    LayerTimes fresh;
    fresh.layer = layer;
    fresh.compute_us.resize(answers.size());
    fresh.round_trip_us.resize(answers.size());
    fresh.wait_us.resize(answers.size());
    found = layers_.insert(found, std::move(fresh));
  }
  LayerTimes& times = *found;
  ++times.num_steps;
  // A plain mean of the first ones.
  const float weight = std::max(kNewestWeight, 1.0f / static_cast<float>(times.num_steps));
  const auto add = [weight](float& mean, float value) { mean += weight * (value - mean); };
  add(times.tokens, static_cast<float>(num_tokens));
  for (size_t worker = 0; worker < answers.size(); ++worker) {
    add(times.compute_us[worker], static_cast<float>(answers[worker].compute_us));
    add(times.round_trip_us[worker], us_between(submitted, answers[worker].arrived));
    add(times.wait_us[worker], us_between(waited_from, answers[worker].arrived));
  }
}

std::vector<LayerTimes> StepTimes::layers() const {
  const std::lock_guard lock(mutex_);
  return layers_;
}

}  // namespace duck
