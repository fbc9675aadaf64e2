// transfer.h - moving bytes between host memory and the tensors that hold a sequence's state.
//
// Host tensors are copied directly after one llama_synchronize().  Device tensors go through the
// asynchronous copies of the context's own backend: those are ordered with the computation, while
// a plain ggml_backend_tensor_get/set runs on a stream of its own and may read what a kernel is
// still writing.  finish() waits once for everything queued.
//
// With layers on several devices each copy is made at once instead, after waiting for the computation: a
// queued copy to a device that is not the thread's current one failed on CUDA (short rows, "unspecified
// launch failure"), and only the plain calls choose the device themselves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-backend.h"
#include "ggml.h"

struct llama_context;

namespace gufo {

int n_gpus(const llama_context * ctx);  // devices that hold layers

class transfer {
public:
    // check: look for NaN in everything that comes in.  A NaN survives clearing (0 x NaN) and would
    // poison the next sequence of the slot, so it is refused and none of it stays in the tensor.
    explicit transfer(llama_context * ctx, bool check = true);
    ~transfer();  // waits: a queued copy must not outlive the caller's buffer
    transfer(const transfer &) = delete;
    transfer & operator=(const transfer &) = delete;

    void out(const ggml_tensor * tensor, size_t offset, void * dst, size_t n_bytes);
    void in(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes);
    // n_copies blocks of n_bytes: block i lies stride bytes after block i - 1 in host memory, and
    // directly behind it in the tensor.  One call instead of thousands on a device.
    void out_blocks(const ggml_tensor * tensor, size_t offset, void * dst, size_t n_bytes, size_t n_copies, size_t stride);
    void in_blocks(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes, size_t n_copies, size_t stride);
    // At once; waits for what is queued, of the computation too.
    void zero(ggml_tensor * tensor, size_t offset, size_t n_bytes);
    void finish();
    bool checks() const { return check_; }

private:
    [[noreturn]] static void refuse(const ggml_tensor * tensor);
    ggml_backend_t backend_of(const ggml_tensor * tensor);

    bool check_;

    llama_context * ctx_;
    bool several_gpus_;
    ggml_backend_t pending_[16] = {};
    int n_pending_ = 0;
};

}  // namespace gufo
