// What other bindings share of a Python LinearRuntime: its threads, which compute one thing at a time.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels/experts.h"

namespace duck {

class ThreadPool;

struct LinearPool {
  ThreadPool& pool;
  Isa isa;
};

// Of a duckllm._native.LinearRuntime, which has to outlive the use. Throws nanobind::cast_error for another
// object.
LinearPool linear_pool(nanobind::handle runtime);

}  // namespace duck
