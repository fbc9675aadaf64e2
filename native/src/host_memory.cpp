// host_memory.cpp - host memory for transfers, pinned where the model's device offers it.
#include <memory>
#include <string>

#include "llama-model.h"
#include "slots.h"

struct gufo_host_memory {
    ggml_backend_buffer_t buffer = nullptr;
    bool pinned = false;
    ~gufo_host_memory() {
        if (buffer) {
            ggml_backend_buffer_free(buffer);
        }
    }
};

extern "C" {

gufo_host_memory * gufo_host_alloc(gufo_state * state, uint64_t n_bytes) {
    return guarded_ptr([&]() -> gufo_host_memory * {
        auto memory = std::make_unique<gufo_host_memory>();
        for (const auto & device : state->ctx->get_model().devices) {
            if (ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device.dev)) {
                memory->buffer = ggml_backend_buft_alloc_buffer(pinned, n_bytes);
                memory->pinned = memory->buffer != nullptr;
                break;
            }
        }
        if (!memory->buffer) {
            memory->buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n_bytes);
        }
        if (!memory->buffer) {
            throw gufo_failure(GUFO_E_BACKEND, "no host memory for " + std::to_string(n_bytes) + " bytes");
        }
        return memory.release();
    });
}

void * gufo_host_ptr(gufo_host_memory * memory) {
    return ggml_backend_buffer_get_base(memory->buffer);
}

int gufo_host_is_pinned(const gufo_host_memory * memory) {
    return memory->pinned;
}

void gufo_host_free(gufo_host_memory * memory) {
    delete memory;
}

}  // extern "C"
