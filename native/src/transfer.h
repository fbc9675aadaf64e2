// transfer.h - moving bytes between host memory and the tensors that hold a sequence's state.
//
// Host tensors are copied directly after one llama_synchronize().  Device tensors go through the
// asynchronous copies of the context's own backend: those are ordered with the computation, while
// a plain ggml_backend_tensor_get/set runs on a stream of its own and may read what a kernel is
// still writing.  finish() waits once for everything queued.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-backend.h"
#include "ggml.h"

struct llama_context;

namespace gufo {

class transfer {
public:
    explicit transfer(llama_context * ctx);
    ~transfer();  // waits: a queued copy must not outlive the caller's buffer
    transfer(const transfer &) = delete;
    transfer & operator=(const transfer &) = delete;

    void out(const ggml_tensor * tensor, size_t offset, void * dst, size_t n_bytes);
    // Refuses NaN before anything is written: a NaN survives clearing (0 x NaN) and would poison
    // the next sequence of the slot.
    void in(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes);
    void finish();

private:
    ggml_backend_t backend_of(const ggml_tensor * tensor);

    llama_context * ctx_;
    ggml_backend_t pending_[16] = {};
    int n_pending_ = 0;
};

// True when the bytes, read as this type, hold a NaN.  Integer types never do; for block-quantised
// types the block scales are looked at.
bool holds_nan(ggml_type type, const void * data, size_t n_bytes);

}  // namespace gufo
