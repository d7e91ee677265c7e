// The part of the Python border that is about files.
#pragma once

#include <nanobind/nanobind.h>

void bind_io(nanobind::module_& module);
