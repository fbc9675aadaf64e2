// transfer.cpp - see transfer.h.
#include "transfer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"
#include "llama-context.h"

namespace gufo {

namespace {

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

// Blocks small enough to stay in the first-level cache between the NaN check and the copy.
constexpr size_t check_block = 16 * 1024;

template <typename T> bool any_above(const uint8_t * p, size_t n, T magnitude, T limit) {
    T found = 0;  // no early exit inside: the loop stays vectorised
    for (size_t i = 0; i < n; ++i) {
        T v;
        std::memcpy(&v, p + i * sizeof(T), sizeof(T));
        found |= static_cast<T>((v & magnitude) > limit);
    }
    return found != 0;
}

bool scale_is_nan(const uint8_t * p) {
    uint16_t v;
    std::memcpy(&v, p, sizeof(v));
    return (v & 0x7fff) > 0x7c00;
}

}  // namespace

bool holds_nan(ggml_type type, const void * data, size_t n_bytes) {
    const auto * p = static_cast<const uint8_t *>(data);
    size_t n_scales = 1;  // half-precision scales at the head of each block
    switch (type) {
        case GGML_TYPE_F32:
            return any_above<uint32_t>(p, n_bytes / 4, 0x7fffffffu, 0x7f800000u);
        case GGML_TYPE_F16:
            return any_above<uint16_t>(p, n_bytes / 2, 0x7fff, 0x7c00);
        case GGML_TYPE_BF16:
            return any_above<uint16_t>(p, n_bytes / 2, 0x7fff, 0x7f80);
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_1:
            n_scales = 2;
            break;
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL:
            break;
        default:
            return false;
    }
    const size_t block = ggml_type_size(type);
    for (size_t at = 0; at + block <= n_bytes; at += block) {
        for (size_t s = 0; s < n_scales; ++s) {
            if (scale_is_nan(p + at + 2 * s)) {
                return true;
            }
        }
    }
    return false;
}

transfer::transfer(llama_context * ctx, bool check) : check_(check), ctx_(ctx) {
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
    if (ggml_backend_buffer_is_host(buffer_of(tensor))) {
        std::memcpy(dst, static_cast<const char *>(tensor->data) + offset, n_bytes);
    } else {
        ggml_backend_tensor_get_async(backend_of(tensor), tensor, dst, offset, n_bytes);
    }
}

void transfer::refuse_nan(const ggml_tensor * tensor, const void * src, size_t n_bytes) const {
    if (holds_nan(tensor->type, src, n_bytes)) {
        throw gufo_failure(GUFO_E_REJECTED, std::string("the payload of ") + tensor->name + " holds NaN");
    }
}

void transfer::in(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes) {
    in_blocks(tensor, offset, src, n_bytes, 1, n_bytes);
}

void transfer::in_blocks(ggml_tensor * tensor, size_t offset, const void * src, size_t n_bytes, size_t n_copies, size_t stride) {
    const auto * from = static_cast<const char *>(src);
    if (!ggml_backend_buffer_is_host(buffer_of(tensor))) {
        for (size_t i = 0; check_ && i < n_copies; ++i) {
            refuse_nan(tensor, from + i * stride, n_bytes);
        }
        ggml_backend_tensor_set_2d_async(backend_of(tensor), tensor, src, offset, n_bytes, n_copies, n_bytes, stride);
        return;
    }
    // whole blocks of the type, or a block scale could be split between two checks
    const size_t unit = ggml_type_size(tensor->type);
    const size_t step = check_ ? check_block / unit * unit : std::max<size_t>(n_bytes, 1);
    for (size_t i = 0; i < n_copies; ++i) {
        char * to = static_cast<char *>(tensor->data) + offset + i * n_bytes;
        for (size_t at = 0; at < n_bytes; at += step) {
            const size_t n = n_bytes - at < step ? n_bytes - at : step;
            if (check_) {
                refuse_nan(tensor, from + i * stride + at, n);
            }
            std::memcpy(to + at, from + i * stride + at, n);
        }
    }
}

void transfer::zero(ggml_tensor * tensor, size_t offset, size_t n_bytes) {
    finish();
    if (ggml_backend_buffer_is_host(buffer_of(tensor))) {
        std::memset(static_cast<char *>(tensor->data) + offset, 0, n_bytes);
    } else {
        ggml_backend_tensor_memset(tensor, 0, offset, n_bytes);
    }
}

}  // namespace gufo
