// Whether a process was forked since something was made: threads do not go along, and connections are shared
// with the process that made them.
#pragma once

#include <cstdint>

namespace duck {

class ForkMark {
 public:
  ForkMark();  // of this moment
  bool is_forked() const;

 private:
  uint32_t num_forks_;
};

}  // namespace duck
