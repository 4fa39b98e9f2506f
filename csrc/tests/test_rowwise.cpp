// Row-wise operations on buffers of exactly their size, and the router's choice, for the sanitizers' eyes.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/experts.h"
#include "rowwise/route.h"
#include "rowwise/row_kernels.h"

namespace duck {
namespace {

std::vector<float> random_values(size_t size, unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<float> values(size);
  for (float& value : values) value = static_cast<float>(random() % 1000000) * 8e-6f - 4.0f;
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// All outputs of one row, one behind the other.
std::vector<float> run_all(const RowKernels& kernels, size_t size) {
  const auto x = random_values(size, 1), weight = random_values(size, 2), bias = random_values(size, 3);
  std::vector<float> all;
  const auto keep = [&](const std::vector<float>& y) { all.insert(all.end(), y.begin(), y.end()); };
  std::vector<float> y(size);
  kernels.rms_norm(x.data(), weight.data(), size, 1e-6, y.data());
  keep(y);
  kernels.layer_norm(x.data(), weight.data(), bias.data(), size, 1e-6, y.data());
  keep(y);
  kernels.silu_mul(x.data(), weight.data(), size, y.data());
  CHECK(std::fabs(y[0] - x[0] / (1 + std::exp(-x[0])) * weight[0]) <= 1e-5f);
  keep(y);
  kernels.sigmoid(x.data(), size, y.data());
  keep(y);
  kernels.softmax(x.data(), size, y.data());
  double total = 0;
  for (float share : y) total += share;
  CHECK(std::fabs(total - 1) < 1e-6);
  keep(y);
  kernels.scale(y.data(), size, 0.3f);
  keep(y);
  return all;
}

void test_every_size() {
  for (size_t size = 1; size < 100; ++size) {
    const auto expected = run_all(row_kernels(Isa::kScalar), size);
    for (Isa isa : available_isas()) CHECK(same_bits(run_all(row_kernels(isa), size), expected));
  }
}

void test_route() {
  constexpr uint32_t kExperts = 12, kTopK = 5, kRows = 7;
  const auto logits = random_values(kRows * kExperts, 4), bias = random_values(kExperts, 5);
  for (uint32_t num_groups : {1u, 3u, 12u}) {
    for (Isa isa : available_isas()) {
      std::vector<int32_t> ids(kRows * kTopK, -1);
      std::vector<float> weights(kRows * kTopK);
      const Routing routing{Scores::kSigmoid, kExperts, kTopK, num_groups, (num_groups + 1) / 2, true, 2.0f};
      route(row_kernels(isa), routing, logits.data(), bias.data(), kRows, ids.data(), weights.data());
      for (uint32_t row = 0; row < kRows; ++row) {
        unsigned seen = 0;
        float total = 0.0f;
        for (uint32_t k = 0; k < kTopK; ++k) {
          const int32_t id = ids[row * kTopK + k];
          CHECK(id >= 0 && id < static_cast<int32_t>(kExperts) && (seen >> id & 1) == 0);
          seen |= 1u << id;
          total += weights[row * kTopK + k];
        }
        CHECK(std::fabs(total - 2.0f) < 1e-5f);
      }
    }
  }
}

}  // namespace
}  // namespace duck

int main() {
  duck::test_every_size();
  duck::test_route();
  return duck::test::report();
}
