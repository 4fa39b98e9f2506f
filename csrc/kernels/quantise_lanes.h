// The search for the scales of int4 groups, a vector of rows of a matrix at a time. Sums run along a group in
// order, so that every ISA, and the numpy twin, gets the same bits. Included by the quantise.cpp of each ISA;
// Isa is a type of its namespace, so that no ISA's code is taken for another's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/quantise.h"

namespace duck {

template <class Isa>
struct GroupSearch {
  static constexpr size_t kRows = Isa::kRows;
  using Floats = typename Isa::Floats;  // kRows f32
  using Ints = typename Isa::Ints;      // kRows i32
  // Adding it rounds an f32 of less than 2^22 to a whole number, ties to even.
  static constexpr float kRounder = 0x1.8p23f;

  // yes where a comparison held, else no.
  static Floats choose(Ints held, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & held) | ((Ints)no & ~held));
  }

  static Floats rounded(Floats values) {
    values = choose(values < -8.0f, Floats{} - 8.0f, values);
    values = choose(values > 7.0f, Floats{} + 7.0f, values);
    return (values + kRounder) - kRounder;
  }

  Floats weights[kMostGroup];  // as they are, kRows rows side by side
  Floats parts[kMostGroup];    // over the group's largest: from -1 to 1
  float importance[kMostGroup];
  Floats largest, ratio;
  size_t size = 0;

  void load(const GroupedJob& job, size_t row, size_t rows, size_t column) {
    for (size_t i = 0; i < size; ++i) {
      importance[i] = job.importance == nullptr ? 1.0f : job.importance[column + i];
      weights[i] = Floats{};
    }
    for (size_t lane = 0; lane < rows; ++lane) {
      const float* from = job.weights + (row + lane) * job.columns + column;
      for (size_t i = 0; i < size; ++i) weights[i][lane] = from[i];
    }
  }

  // The first weight of the largest magnitude in each row, 1 in rows of zeros; and every weight over it.
  void normalise() {
    largest = Floats{};
    Floats most{};
    for (size_t i = 0; i < size; ++i) {
      const Floats magnitude = choose(weights[i] < 0.0f, -weights[i], weights[i]);
      const Ints more = magnitude > most;
      most = choose(more, magnitude, most);
      largest = choose(more, weights[i], largest);
    }
    largest = choose(largest == 0.0f, Floats{} + 1.0f, largest);
    for (size_t i = 0; i < size; ++i) parts[i] = weights[i] / largest;
  }

  // The scale of least squared error over all starts, in units of the largest weight.
  void search() {
    Floats best = Floats{} - 1.0f;
    ratio = Floats{};
    for (int start = kFirstStart; start <= kLastStart; ++start) {
      const float factor = -0.25f * static_cast<float>(start);
      Floats along{}, squares{};
      for (size_t i = 0; i < size; ++i) {
        const Floats q = rounded(parts[i] * factor);
        const Floats scaled = importance[i] * q;
        along += scaled * parts[i];
        squares += scaled * q;
      }
      const Floats divisor = choose(squares == 0.0f, Floats{} + 1.0f, squares);
      const Floats gain = along * along / divisor;
      const Ints more = gain > best;
      best = choose(more, gain, best);
      ratio = choose(more, along / divisor, ratio);
    }
  }

  void store(const GroupedJob& job, size_t row, size_t rows, size_t column, RoundingSums& sums) {
    const size_t groups = (job.columns + job.group_size - 1) / job.group_size;
    Floats scale{};
    for (size_t lane = 0; lane < rows; ++lane) {
      const uint16_t word = scale_word(ratio[lane] * largest[lane], job.bf16);
      job.scale_words[(row + lane) * groups + column / job.group_size] = word;
      scale[lane] = scale_of_word(word, job.bf16);
    }
    const Floats divisor = choose(scale == 0.0f, Floats{} + 1.0f, scale);
    Ints codes[kMostGroup];
    Floats errors{}, sources{}, worst{};
    Ints flushed{};
    for (size_t i = 0; i < size; ++i) {
      const Floats w = weights[i];
      const Floats q = choose(scale == 0.0f, Floats{}, rounded(w / divisor));
      codes[i] = __builtin_convertvector(q, Ints) + 8;
      Floats error = q * scale - w;
      error = choose(error < 0.0f, -error, error);
      // In units of the largest weight: squares of weights themselves may be beyond f32, or 0 in it.
      const Floats share = error / largest;
      errors += share * share;
      sources += parts[i] * parts[i];
      worst = choose(error > worst, error, worst);
      flushed -= (q == 0.0f) & (w != 0.0f);
    }
    for (size_t lane = 0; lane < rows; ++lane) {
      uint8_t* to = job.codes + (row + lane) * job.columns + column;
      for (size_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(codes[i][lane]);
      const float top = largest[lane] < 0.0f ? -largest[lane] : largest[lane];
      const float relative = worst[lane] / top;
      const double unit = static_cast<double>(top) * top;
      sums.squared_error += errors[lane] * unit;
      sums.squared_source += sources[lane] * unit;
      sums.max_relative = relative > sums.max_relative ? relative : sums.max_relative;
      sums.flushed += static_cast<uint32_t>(flushed[lane]);
    }
  }

  static RoundingSums run(const GroupedJob& job) {
    GroupSearch search;
    RoundingSums sums;
    for (size_t row = 0; row < job.rows; row += kRows) {
      const size_t rows = job.rows - row < kRows ? job.rows - row : kRows;
      for (size_t column = 0; column < job.columns; column += job.group_size) {
        search.size = job.columns - column < job.group_size ? job.columns - column : job.group_size;
        search.load(job, row, rows, column);
        search.normalise();
        search.search();
        search.store(job, row, rows, column, sums);
      }
    }
    return sums;
  }
};

}  // namespace duck
