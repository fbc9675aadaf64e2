// state.cpp - the C surface of slots: run, and give state.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "llama-ext.h"
#include "pieces.h"
#include "slots.h"

namespace {

std::atomic<int> log_min_level{GGML_LOG_LEVEL_WARN};
std::mutex log_mutex;
std::string last_log;

void on_log(ggml_log_level level, const char * text, void *) {
    static thread_local int previous = GGML_LOG_LEVEL_INFO;
    if (level != GGML_LOG_LEVEL_CONT) {
        previous = level;
    }
    const int effective = previous;
    if (effective >= GGML_LOG_LEVEL_WARN) {
        std::lock_guard<std::mutex> lock(log_mutex);
        if (level == GGML_LOG_LEVEL_CONT) {
            last_log += text;
        } else if (effective == GGML_LOG_LEVEL_ERROR || last_log.size() < 2) {
            last_log = text;
        }
    }
    if (effective >= log_min_level.load()) {
        std::fputs(text, stderr);
    }
}

}  // namespace

static gufo_state * open_state(void * ctx, uint32_t n_slots, int * status, bool with_state) {
    gufo_state * result = nullptr;
    *status = guarded([&] {
        if (!ctx || n_slots == 0) {
            return gufo_set_error(GUFO_E_INVALID, "a context and at least one slot are needed");
        }
        auto state = std::make_unique<gufo_state>();
        state->ctx = static_cast<llama_context *>(ctx);
        state->n_slots = n_slots;
        state->restore.resize(n_slots);
        state->output.assign(n_slots, -1);
        if (with_state) {
            state->mem = std::make_unique<gufo::memory>(state->ctx, n_slots);
        }
        result = state.release();
        return static_cast<int>(GUFO_OK);
    });
    return result;
}

extern "C" {

int gufo_abi_version(void) {
    return GUFO_ABI_VERSION;
}

void gufo_log_level(int min_level) {
    log_min_level = min_level;
    llama_log_set(on_log, nullptr);
}

const char * gufo_last_log(void) {
    static thread_local std::string copy;
    std::lock_guard<std::mutex> lock(log_mutex);
    copy = last_log;
    last_log.clear();
    return copy.c_str();
}

uint64_t gufo_host_bytes(const void * ctx) {
    uint64_t n_bytes = 0;
    guarded([&] {
        for (const auto & [type, used] : llama_get_memory_breakdown(static_cast<const llama_context *>(ctx))) {
            if (ggml_backend_buft_is_host(type)) {
                n_bytes += used.context + used.compute;
            }
        }
        return int(GUFO_OK);
    });
    return n_bytes;
}

gufo_state * gufo_state_open(void * ctx, uint32_t n_slots, int * status) {
    return open_state(ctx, n_slots, status, true);
}

gufo_state * gufo_run_open(void * ctx, uint32_t n_slots, int * status) {
    return open_state(ctx, n_slots, status, false);
}

void gufo_state_close(gufo_state * state) {
    delete state;
}

const char * gufo_memory_kind(const gufo_state * state) {
    return state->mem ? state->mem->kind().c_str() : "unsupported";
}

uint32_t gufo_n_components(const gufo_state * state) {
    return state->mem ? static_cast<uint32_t>(state->mem->components().size()) : 0;
}

int gufo_get_component(const gufo_state * state, uint32_t index, gufo_component * out) {
    return guarded([&] {
        const auto & all = state->stateful().components();
        if (index >= all.size()) {
            return gufo_set_error(GUFO_E_INVALID, "component " + std::to_string(index) + " of " + std::to_string(all.size()));
        }
        const auto & c = all[index];
        *out = {};
        std::strncpy(out->id, c.id.c_str(), sizeof(out->id) - 1);
        std::strncpy(out->dtype, c.dtype.c_str(), sizeof(out->dtype) - 1);
        out->is_rows = c.is_rows;
        out->layout = c.layout;
        out->n_bytes = c.n_bytes;
        return static_cast<int>(GUFO_OK);
    });
}

uint64_t gufo_row_bytes(const gufo_state * state) {
    return state->mem ? state->mem->row_bytes() : 0;
}

uint64_t gufo_private_bytes(const gufo_state * state) {
    return state->mem ? state->mem->private_bytes() : 0;
}

int gufo_decode(gufo_state * state, uint32_t n, const int32_t * tokens, const uint32_t * slots, const int8_t * want) {
    return guarded([&] {
        std::vector<llama_token> token(tokens, tokens + n);
        std::vector<llama_pos> pos(n);
        std::vector<int32_t> n_seq(n, 1);
        std::vector<llama_seq_id> seq(n);
        std::vector<llama_seq_id *> seqs(n);
        std::vector<int8_t> logits(want, want + n);
        std::vector<int32_t> output(state->n_slots, -1);
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(state->ctx)));
        int32_t next = 0;
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t slot = slots[i];
            if (i == 0 || slot != slots[i - 1]) {
                if (i > 0 && slot < slots[i - 1]) {
                    return gufo_set_error(GUFO_E_INVALID, "tokens must be grouped by ascending slot");
                }
                state->check_runnable(slot);
                next = state->position(slot);
            }
            if (tokens[i] < 0 || tokens[i] >= n_vocab) {
                return gufo_set_error(GUFO_E_INVALID, "token id " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(n_vocab));
            }
            if (static_cast<uint32_t>(next) >= state->n_ctx_slot()) {
                return gufo_set_error(GUFO_E_FULL, "slot " + std::to_string(slot) + " is full: its context holds " + std::to_string(state->n_ctx_slot()) + " tokens");
            }
            pos[i] = next++;
            seq[i] = static_cast<llama_seq_id>(slot);
            seqs[i] = &seq[i];
            if (want[i]) {
                output[slot] = static_cast<int32_t>(i);
            }
        }
        llama_batch batch{static_cast<int32_t>(n), token.data(), nullptr, pos.data(), n_seq.data(), seqs.data(), logits.data()};
        state->output.assign(state->n_slots, -1);  // a failed pass leaves no logits to read
        const int rc = llama_decode(state->ctx, batch);
        if (rc == 1) {
            return gufo_set_error(GUFO_E_FULL, "no free cells for " + std::to_string(n) + " tokens");
        }
        if (rc == 2) {
            return gufo_set_error(GUFO_E_ABORTED, "the computation was stopped");
        }
        if (rc != 0) {
            return gufo_set_error(GUFO_E_BACKEND, "llama_decode failed with code " + std::to_string(rc));
        }
        state->output = output;
        return static_cast<int>(GUFO_OK);
    });
}

int32_t gufo_output_index(const gufo_state * state, uint32_t slot) {
    return slot < state->n_slots ? state->output[slot] : -1;
}

int gufo_logits(gufo_state * state, uint32_t slot, float * out, uint64_t n_floats) {
    return guarded([&] {
        state->check_runnable(slot);
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(state->ctx)));
        if (n_floats < static_cast<uint64_t>(n_vocab)) {
            return gufo_set_error(GUFO_E_INVALID, "the logits need " + std::to_string(n_vocab) + " floats");
        }
        const float * logits = state->output[slot] < 0 ? nullptr : llama_get_logits_ith(state->ctx, state->output[slot]);
        if (!logits) {
            return gufo_set_error(GUFO_E_BACKEND, "the last decode gave no logits for slot " + std::to_string(slot));
        }
        std::memcpy(out, logits, sizeof(float) * static_cast<size_t>(n_vocab));
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_position(gufo_state * state, uint32_t slot, int32_t * out) {
    return guarded([&] {
        state->check_runnable(slot);
        *out = state->position(slot);
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_positions(gufo_state * state, uint32_t slot, int32_t * out, uint32_t n, uint32_t * n_out) {
    return guarded([&] {
        state->check_slot(slot);
        const std::vector<int32_t> all = state->stateful().positions(slot);
        *n_out = static_cast<uint32_t>(all.size());
        for (uint32_t i = 0; i < n && i < all.size(); ++i) {
            out[i] = all[i];
        }
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_truncate(gufo_state * state, uint32_t slot, int32_t n_tokens) {
    return guarded([&] {
        state->check_runnable(slot);
        const int32_t have = n_tokens == 0 ? 0 : state->position(slot);  // 0 must work on a slot in doubt
        if (n_tokens < 0 || n_tokens > have) {
            return gufo_set_error(GUFO_E_INVALID, "cannot keep " + std::to_string(n_tokens) + " tokens of a slot that holds " + std::to_string(have));
        }
        if (n_tokens == 0) {
            state->empty_slot(slot);
        } else {
            state->stateful().truncate(slot, n_tokens);
            state->output[slot] = -1;
        }
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_clear_all(gufo_state * state) {
    return guarded([&] {
        llama_memory_clear(llama_get_memory(state->ctx), true);
        for (gufo::restore_progress & r : state->restore) {
            r = gufo::restore_progress();
        }
        state->output.assign(state->n_slots, -1);
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_pieces_out(gufo_state * state, uint32_t slot, const gufo_piece * pieces, uint32_t n_pieces) {
    return guarded([&] {
        state->check_runnable(slot);
        gufo::memory & mem = state->stateful();
        for (uint32_t i = 0; i < n_pieces; ++i) {
            const gufo_piece & p = pieces[i];
            if (p.n != p.buffer_rows || p.buffer_bytes < static_cast<uint64_t>(p.n) * mem.row_bytes()) {
                return gufo_set_error(GUFO_E_INVALID, "the buffer of " + std::to_string(p.buffer_bytes) + " bytes is too small for " + std::to_string(p.n) + " rows");
            }
            mem.require_rows(slot, p.first, p.n);
        }
        gufo::transfer io(state->ctx);
        for (uint32_t i = 0; i < n_pieces;) {
            const gufo_piece & p = pieces[i];
            const gufo::piece_run run = gufo::first_run(pieces + i, n_pieces - i);
            auto * dst = static_cast<uint8_t *>(p.buffer);
            for (const gufo::row_tensor & r : mem.rows(slot)) {
                io.out_blocks(r.tensor, p.first * r.row_bytes, dst, p.n * r.row_bytes, run.n, run.stride);
                dst += p.n * r.row_bytes;
            }
            i += run.n;
        }
        io.finish();
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_rows_out(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, void * out, uint64_t out_bytes) {
    const gufo_piece one = {out, 0, out_bytes, first, n, n};
    return gufo_pieces_out(state, slot, &one, 1);
}

int gufo_private_out(gufo_state * state, uint32_t slot, void * out, uint64_t out_bytes) {
    return guarded([&] {
        state->check_runnable(slot);
        gufo::memory & mem = state->stateful();
        if (out_bytes < mem.private_bytes()) {
            return gufo_set_error(GUFO_E_INVALID, "the buffer of " + std::to_string(out_bytes) + " bytes is too small for the private state");
        }
        if (mem.private_bytes() > 0) {
            mem.private_out(slot, mem.position(slot), static_cast<uint8_t *>(out));
        }
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_metadata(gufo_state * state, uint32_t slot, void * out, uint64_t out_bytes, uint64_t * n_out) {
    return guarded([&] {
        state->check_runnable(slot);
        const std::vector<uint8_t> meta = state->stateful().metadata(slot);
        *n_out = meta.size();
        std::memcpy(out, meta.data(), meta.size() < out_bytes ? meta.size() : out_bytes);
        return static_cast<int>(GUFO_OK);
    });
}

}  // extern "C"
