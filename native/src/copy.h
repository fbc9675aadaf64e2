// copy.h - host copies of state: out as fast as the memory takes it, in with a look for NaN.
//
// A payload's NaN must not stay in a tensor: it survives clearing (0 x NaN) and would poison the
// slot's next sequence.  Looking first and copying then reads everything twice from memory and runs
// at 0.7 of memcpy's speed, whatever the block size; so values are looked at while they pass through
// the registers, and a range in which NaN was found is zeroed again before anything can run.
// Large pieces are written past the caches (x86: non-temporal stores): neither a checkpoint nor the
// restored state is read soon, and not fetching what is overwritten makes this 1.3 x memcpy.
#pragma once

#include <cstddef>

#include "ggml.h"

namespace gufo {

void copy_bytes(void * dst, const void * src, size_t n_bytes);

// False when the bytes, read as this type, hold a NaN; the destination is then zero.  Integer types
// hold none; of block-quantised types the scales are looked at.  Whole elements or blocks only.
bool copy_checked(ggml_type type, void * dst, const void * src, size_t n_bytes);

// The look alone, for a destination that is not host memory.
bool holds_nan(ggml_type type, const void * data, size_t n_bytes);

}  // namespace gufo
