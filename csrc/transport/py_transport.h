// The transport of a Python object, for other bindings.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "transport/transport.h"

namespace duck {

// Throws nanobind's cast_error for an object that is no Transport.
std::shared_ptr<Transport> transport_of(nanobind::handle object);

}  // namespace duck
