// A stand-in for the experts of a worker that is not there: takes as long as the node and its link would, by
// sleeping, and answers a pattern that its host can check. The step loop around it is the real one.
//
// Modelled: a node that computes one step after the other, each in fixed_us + max(distinct experts x
// expert_us, ids x row_us); its link, each direction a Port; the host's port, shared by all; and a delay each
// way. A request passes the host's port and the node's while it does (switches do not store a message), waits
// until the node is free, is computed, and its reply passes the node's port and the host's. So one step's
// reply and another's request pass while a third is computed, as they would.
//
// Real: the connection, its frames and their bytes, and all that the host does with them. A reply is sent
// when the model says that it would have arrived, or as soon after as this machine manages.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/experts.h"
#include "simulate/network.h"

namespace duck::simulate {

// Microseconds; a link of 0 bytes a microsecond takes no time.
struct NodeModel {
  double fixed_us = 0;
  double expert_us = 0;  // reading one expert's slice
  double row_us = 0;     // multiplying one row with one expert's slice
  double link_bytes_per_us = 0;
  double delay_us = 0;  // each way
};

// Replies: y[t][h] = pattern(offset(step, t, first_stripe) + h), whole numbers from -15 to 15, so that any
// sum of them is exact in f32, and each is in bf16. tests/simulate and duckllm/simulate/pattern.py say it
// again.
inline constexpr uint32_t kNumOffsets = 64;
float pattern(uint64_t index);
uint32_t pattern_offset(uint32_t step, uint32_t row, uint32_t first_stripe);

class StandIn final : public StepCompute {
 public:
  StandIn(const ExpertShape& shape, const NodeModel& node, std::shared_ptr<Network> network,
          uint64_t request_row_bytes, uint64_t reply_row_bytes);

  const ExpertShape& shape() const override { return shape_; }
  // Throws std::invalid_argument for an id outside [0, E), as Experts does.
  void run(const LayerUnits& layer, const StepRows& rows, float* y) override;

  // What the node would take for a step of these ids.
  Nanoseconds compute_time(const StepRows& rows);
  // When it has computed a step that the loop came to at `now`, and that is to come next.
  Time computed(Time now, const StepRows& rows);
  // The loop went on from here then.
  void returned(Time at) { returned_ = at; }

 private:
  const ExpertShape shape_;
  const NodeModel node_;
  const std::shared_ptr<Network> network_;
  const uint64_t request_row_bytes_, reply_row_bytes_;
  const Nanoseconds delay_;
  Port in_, out_;
  Time free_;                      // of its last computation
  Time returned_;                  // run() did
  std::vector<uint32_t> seen_in_;  // one an expert: the last step that chose it
  uint32_t num_runs_ = 0;
  std::vector<float> pattern_;
};

}  // namespace duck::simulate
