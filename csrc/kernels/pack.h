// Packing of a checkpoint's FP8 e4m3 experts into fp9 or fp8 units, and the quantisation of float weights to
// e4m3 blocks before it. Called by kernels/bind.cpp for the converter; src/duckllm/weights/units.py
// and e4m3.py are the numpy twins, byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_format.h"

namespace duck {

// One expert as the checkpoint has it: e4m3 bytes, row-major, and one f32 scale per 128x128 block or row; or
// int8 codes with such scales.
struct E4m3Expert {
  size_t hidden_size = 0;             // H
  size_t intermediate_size = 0;       // I
  const uint8_t* gate = nullptr;      // [I, H]
  const uint8_t* up = nullptr;        // [I, H]
  const uint8_t* down = nullptr;      // [H, I]
  const float* gate_scale = nullptr;  // [ceil(I / 128), ceil(H / 128)], or [I] by channels
  const float* up_scale = nullptr;    // the same
  const float* down_scale = nullptr;  // [ceil(H / 128), ceil(I / 128)], or [H] by channels
  ScaleLayout scale_layout = ScaleLayout::kBlock;
};

// The fp9 magnitude of an e4m3 byte (its sign bit ignored). NaN (0x7f, 0xff) has none; the caller has
// excluded it.
uint8_t fp9_magnitude(uint8_t e4m3);

// A matrix of e4m3 bytes for one record: element (row, lane) at first[row * row_stride + lane * lane_stride],
// for row < rows and lane < lanes; zero elsewhere.
struct RecordSource {
  const uint8_t* first;
  size_t row_stride, lane_stride, rows, lanes;
};

// Fills rows [first_row, first_row + source.rows) of an fp9, fp8 or int8 record that is zero there.
void pack_rows(const RecordSource& source, size_t first_row, WeightFormat format, uint8_t* record);

// How many of the bytes are e4m3 NaN (0x7f, 0xff).
size_t count_nan_e4m3(const uint8_t* bytes, size_t size);

// Writes all ceil(I / 16) units, unit_bytes(format, H, scale_layout) each, padding included, fp9, fp8 or
// int8. The expert must hold no NaN.
void pack_expert_units(const E4m3Expert& expert, WeightFormat format, uint8_t* units);

// The e4m3 byte nearest to a value, ties to even, magnitudes over 448 to 448. The value must not be NaN.
uint8_t e4m3_from_f32(float value);

// Quantises [rows, columns] f32, all finite, to e4m3 with one scale per 128x128 block: scale = amax / 448, at
// least the smallest normal f32 (1 where amax is 0); byte = e4m3_from_f32(weight / scale). All in f32.
void quantize_e4m3_blocks(const float* weights, size_t rows, size_t columns, uint8_t* bytes, float* scales);

}  // namespace duck
