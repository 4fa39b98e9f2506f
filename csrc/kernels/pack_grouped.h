// Packing of experts of 4-bit codes into units of a grouped format. Called by kernels/bind_grouped.cpp for
// the converter; src/duckllm/weights/grouped.py is the numpy twin, byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_format.h"

namespace duck {

// A matrix of codes, row-major, one a byte; groups run along its rows.
struct GroupedMatrix {
  const uint8_t* codes = nullptr;         // [rows, columns], 0 to 15
  const uint16_t* scale_words = nullptr;  // [rows, ceil(columns / group_size)]
  const uint8_t* zeros = nullptr;         // the same; null: 8, or 0 in mxfp4
  size_t group_size = 0;
};

struct GroupedExpert {
  size_t hidden_size = 0;        // H
  size_t intermediate_size = 0;  // I
  GroupedMatrix gate, up;        // [I, H]; groups of a multiple of 32, or of all of a row
  GroupedMatrix down;            // [H, I]; groups of a multiple of 16, or of all of a row
};

// Writes all ceil(I / 16) units, unit_bytes(format, H) each, padding included.
void pack_grouped_units(const GroupedExpert& expert, WeightFormat format, uint8_t* units);

}  // namespace duck
