// transfer.cpp - see transfer.h.
#include "transfer.h"

#include <cstring>
#include <string>

#include "copy.h"
#include "error.h"
#include "llama-context.h"

namespace gufo {

namespace {

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

}  // namespace

int n_gpus(const llama_context * ctx) {
    const ggml_backend_sched_t sched = ctx->get_sched();
    int n = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i)));
        n += type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
    }
    return n;
}

transfer::transfer(llama_context * ctx, bool check) : check_(check), ctx_(ctx), several_gpus_(n_gpus(ctx) > 1) {
    ctx_->synchronize();
}

transfer::~transfer() {
    finish();
}

void transfer::finish() {
    for (int i = 0; i < n_pending_; ++i) {
        ggml_backend_synchronize(pending_[i]);
    }
    n_pending_ = 0;
}

ggml_backend_t transfer::backend_of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buffer_of(tensor));
    const ggml_backend_sched_t sched = ctx_->get_sched();
    ggml_backend_t found = nullptr;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched) && !found; ++i) {
        const ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == ggml_backend_buft_get_device(buft)) {
            found = backend;
        }
    }
    if (!found) {
        throw gufo_failure(GUFO_E_UNSUPPORTED,
                           std::string("no backend of this context owns the buffer of ") + tensor->name);
    }
    for (int i = 0; i < n_pending_; ++i) {
        if (pending_[i] == found) {
            return found;
        }
    }
    if (n_pending_ == 16) {
        finish();
    }
    pending_[n_pending_++] = found;
    return found;
}

void transfer::out(const ggml_tensor * tensor, size_t offset, void * dst, size_t n_bytes) {
    out_blocks(tensor, offset, dst, n_bytes, 1, n_bytes);
}

void transfer::out_blocks(const ggml_tensor * tensor, size_t offset, void * dst, size_t n_bytes, size_t n_copies, size_t stride) {
    if (ggml_backend_buffer_is_host(buffer_of(tensor))) {
        for (size_t i = 0; i < n_copies; ++i) {
            copy_bytes(static_cast<char *>(dst) + i * stride, static_cast<const char *>(tensor->data) + offset + i * n_bytes, n_bytes);
        }
    } else if (several_gpus_) {
        ctx_->synchronize();
        ggml_backend_tensor_get_2d(tensor, dst, offset, n_bytes, n_copies, n_bytes, stride);
    } else {
        ggml_backend_tensor_get_2d_async(backend_of(tensor), tensor, dst, offset, n_bytes, n_copies, n_bytes, stride);
    }
}

void transfer::refuse(const ggml_tensor * tensor) {
    throw gufo_failure(GUFO_E_REJECTED, std::string("the payload of ") + tensor->name + " holds NaN");
}

void transfer::in(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes) {
    in_blocks(tensor, offset, src, n_bytes, 1, n_bytes);
}

void transfer::in_blocks(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes, size_t n_copies, size_t stride) {
    const auto * from = static_cast<const char *>(src);
    if (ggml_backend_buffer_is_host(buffer_of(tensor))) {
        for (size_t i = 0; i < n_copies; ++i) {
            char * to = static_cast<char *>(tensor->data) + offset + i * n_bytes;
            if (!check_) {
                copy_bytes(to, from + i * stride, n_bytes);
            } else if (!copy_checked(tensor->type, to, from + i * stride, n_bytes)) {
                refuse(tensor);
            }
        }
        return;
    }
    for (size_t i = 0; check_ && i < n_copies; ++i) {
        if (holds_nan(tensor->type, from + i * stride, n_bytes)) {
            refuse(tensor);
        }
    }
    if (several_gpus_) {
        ctx_->synchronize();
        ggml_backend_tensor_set_2d(tensor, src, offset, n_bytes, n_copies, n_bytes, stride);
    } else {
        ggml_backend_tensor_set_2d_async(backend_of(tensor), tensor, src, offset, n_bytes, n_copies, n_bytes, stride);
    }
}

void transfer::zero(ggml_tensor * tensor, size_t offset, size_t n_bytes) {
    finish();
    ctx_->synchronize();
    if (ggml_backend_buffer_is_host(buffer_of(tensor))) {
        std::memset(static_cast<char *>(tensor->data) + offset, 0, n_bytes);
    } else {
        ggml_backend_tensor_memset(tensor, 0, offset, n_bytes);
    }
}

}  // namespace gufo
