// A step of many rows with the tile kernels, for a number of rows that a decoded tile is used for and a
// `multiply` of one's choice: the course of kernels/gate_up.cpp and down.cpp. Used by module.cpp.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ablation/decode_step.h"

namespace duck::ablation {

class TileStep {
 public:
  // hidden_size a multiple of 128.
  TileStep(uint32_t hidden_size, uint32_t num_stripes, uint32_t max_experts, uint32_t max_rows, Isa isa,
           ThreadPool& pool);

  // y [T, H] = sum over k of weights[k] * expert ids[k] of x [T, H]: all rows choose the same experts.
  void run(const TileVariant& variant, uint32_t chunk_rows, const Layer& layer, const int32_t* ids,
           const float* weights, uint32_t num_experts, const float* x, uint32_t num_rows, float* y);

 private:
  struct Workspace {
    Workspace(size_t panel_floats, size_t dot_floats)
        : panel(panel_floats), tile(kTileFloats), dots(dot_floats) {}
    FloatBuffer panel, tile, dots;
    uint32_t panel_of = UINT32_MAX;  // the chunk whose x the panel holds
  };

  uint32_t num_chunks() const { return ceil_div(num_rows_, chunk_rows_); }
  Unit unit(size_t index, uint32_t stripe) const;
  void work(int thread);
  void gate_up_unit(Workspace& workspace, uint64_t item);
  void down_chunk(Workspace& workspace, size_t expert, uint32_t first_row, uint32_t count, int thread);

  const uint32_t hidden_size_, num_stripes_, num_records_, max_rows_;
  const KernelTable& table_;
  const FormatKernels& kernels_;
  ThreadPool& pool_;
  FloatBuffer scaled_x_, activations_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;
  WorkRanges items_;
  const std::function<void(int)> work_;

  decltype(KernelTable::multiply) multiply_ = nullptr;
  uint32_t chunk_rows_ = 0, num_rows_ = 0;
  Layer layer_{};
  std::vector<std::pair<int32_t, float>> experts_;
  const float* x_ = nullptr;
  float* y_ = nullptr;
};

}  // namespace duck::ablation
