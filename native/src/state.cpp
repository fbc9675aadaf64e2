// state.cpp - the C surface of slots: run, give state, take state.
//
// What a slot may do is decided here, once: a slot that is being restored neither runs nor gives
// state, and it becomes executable only when every component is complete and at one boundary.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "gufo.h"
#include "llama-context.h"
#include "llama-model.h"
#include "llama.h"
#include "memory.h"
#include "private_loader.h"
#include "transfer.h"

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

struct restore_progress {
    bool active = false;
    std::vector<int32_t> tokens;
    uint32_t next_row = 0;
    std::unique_ptr<gufo::transfer> io;  // copies queued on a device; done when it goes
    std::unique_ptr<gufo::private_loader> private_state;  // null: this layout has none
    uint32_t touched_rows = 0;      // rows [keep, touched) may hold bytes of this restore
    uint32_t keep = 0;
    uint64_t piece_bytes = 0;       // of the piece at next_row, given in parts
};

}  // namespace

struct gufo_host_memory {
    ggml_backend_buffer_t buffer = nullptr;
    bool pinned = false;
    ~gufo_host_memory() {
        if (buffer) {
            ggml_backend_buffer_free(buffer);
        }
    }
};

struct gufo_state {
    llama_context * ctx;
    uint32_t n_slots;
    std::unique_ptr<gufo::memory> mem;  // null: this kind runs, but gives no state
    std::vector<restore_progress> restore;
    std::vector<int32_t> output;  // batch index of the slot's logits in the last decode

    uint32_t n_ctx_slot() const { return llama_n_ctx_seq(ctx); }

    void check_slot(uint32_t slot) const {
        if (slot >= n_slots) {
            throw gufo_failure(GUFO_E_INVALID, "slot " + std::to_string(slot) + " of " + std::to_string(n_slots));
        }
    }
    void check_runnable(uint32_t slot) const {
        check_slot(slot);
        if (restore[slot].active) {
            throw gufo_failure(GUFO_E_NOT_READY, "slot " + std::to_string(slot) + " is being restored; finish or abort the restore first");
        }
    }
    gufo::memory & stateful() const {
        if (!mem) {
            throw gufo_failure(GUFO_E_UNSUPPORTED, "this context's memory kind cannot be saved");
        }
        return *mem;
    }
    restore_progress & restoring(uint32_t slot) {
        check_slot(slot);
        if (!restore[slot].active) {
            throw gufo_failure(GUFO_E_INVALID, "slot " + std::to_string(slot) + " is not being restored");
        }
        return restore[slot];
    }
    int32_t position(uint32_t slot) const {
        return mem ? mem->position(slot) : llama_memory_seq_pos_max(llama_get_memory(ctx), static_cast<llama_seq_id>(slot)) + 1;
    }
    void empty_slot(uint32_t slot) {
        // bytes that failed their checks may be NaN, and free cells must not hold NaN
        if (restore[slot].active) {
            restore_progress & r = restore[slot];
            for (const gufo::row_tensor & t : mem->rows(slot)) {
                if (r.touched_rows > r.keep) {
                    r.io->zero(t.tensor, r.keep * t.row_bytes, (r.touched_rows - r.keep) * t.row_bytes);
                }
            }
            if (r.private_state) {
                r.private_state->wipe(*r.io);
            }
        }
        restore[slot] = restore_progress();
        output[slot] = -1;
        if (mem) {
            mem->truncate(slot, 0);
        } else if (llama_memory_t m = llama_get_memory(ctx)) {
            llama_memory_seq_rm(m, static_cast<llama_seq_id>(slot), -1, -1);
        }
    }
};

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

// A failed load leaves a slot nobody may trust: it is emptied before the error goes out.
template <typename F> static int guarded_load(gufo_state * state, uint32_t slot, F && f) {
    const int rc = guarded(std::forward<F>(f));
    if (rc != GUFO_OK && slot < state->n_slots && state->restore[slot].active) {
        const std::string why = gufo_last_error();
        guarded([&] {
            state->empty_slot(slot);
            return static_cast<int>(GUFO_OK);
        });
        return gufo_set_error(rc, why);
    }
    return rc;
}

// A part may end within a value or a block; looking for NaN in it would see scales where none are.
static void require_trusted_parts(const restore_progress & r) {
    if (r.io->checks()) {
        throw gufo_failure(GUFO_E_REJECTED, "payloads in parts are only taken in a trusted restore");
    }
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
        for (restore_progress & r : state->restore) {
            r = restore_progress();
        }
        state->output.assign(state->n_slots, -1);
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_rows_out(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, void * out, uint64_t out_bytes) {
    return guarded([&] {
        state->check_runnable(slot);
        gufo::memory & mem = state->stateful();
        if (out_bytes < static_cast<uint64_t>(n) * mem.row_bytes()) {
            return gufo_set_error(GUFO_E_INVALID, "the buffer of " + std::to_string(out_bytes) + " bytes is too small for " + std::to_string(n) + " rows");
        }
        mem.require_rows(slot, first, n);
        gufo::transfer io(state->ctx);
        auto * dst = static_cast<uint8_t *>(out);
        for (const gufo::row_tensor & r : mem.rows(slot)) {
            io.out(r.tensor, first * r.row_bytes, dst, n * r.row_bytes);
            dst += n * r.row_bytes;
        }
        io.finish();
        return static_cast<int>(GUFO_OK);
    });
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

int gufo_begin_restore(gufo_state * state, uint32_t slot, const int32_t * tokens, uint32_t n_tokens, uint32_t keep_rows, int trusted) {
    return guarded([&] {
        state->check_runnable(slot);
        gufo::memory & mem = state->stateful();
        if (n_tokens == 0 || n_tokens > state->n_ctx_slot()) {
            return gufo_set_error(GUFO_E_INVALID, "cannot restore " + std::to_string(n_tokens) + " tokens into a context of " + std::to_string(state->n_ctx_slot()));
        }
        if (keep_rows > n_tokens) {
            return gufo_set_error(GUFO_E_INVALID, "keep_rows " + std::to_string(keep_rows) + " is beyond the " + std::to_string(n_tokens) + " tokens");
        }
        if (keep_rows > 0) {
            mem.require_rows(slot, 0, keep_rows);
        }
        restore_progress & r = state->restore[slot];
        r.active = true;
        r.tokens.assign(tokens, tokens + n_tokens);
        r.next_row = mem.row_bytes() ? keep_rows : n_tokens;
        r.keep = r.touched_rows = keep_rows;
        r.io = std::make_unique<gufo::transfer>(state->ctx, trusted == 0);
        if (mem.private_bytes() > 0) {
            r.private_state = std::make_unique<gufo::private_loader>(mem, slot, static_cast<int32_t>(n_tokens));
        }
        state->output[slot] = -1;
        return static_cast<int>(GUFO_OK);
    });
}

// How many pieces from the first on can be copied as one block per tensor: whole buffers of equal
// rows that continue each other and lie at one distance in memory.
static uint32_t run_length(const gufo_piece * pieces, uint32_t n_pieces) {
    uint32_t n = 1;
    const auto address = [&](uint32_t i) { return reinterpret_cast<uintptr_t>(pieces[i].buffer); };
    while (n < n_pieces && pieces[0].n == pieces[0].buffer_rows && pieces[n].n == pieces[0].n && pieces[n].buffer_rows == pieces[0].n &&
           address(n) > address(n - 1) && address(n) - address(n - 1) == address(1) - address(0)) {
        ++n;
    }
    return n;
}

int gufo_load_pieces(gufo_state * state, uint32_t slot, const gufo_piece * pieces, uint32_t n_pieces) {
    return guarded_load(state, slot, [&] {
        restore_progress & r = state->restoring(slot);
        gufo::memory & mem = state->stateful();
        uint32_t next = r.next_row;
        for (uint32_t i = 0; i < n_pieces; ++i) {
            const gufo_piece & p = pieces[i];
            if (p.n > p.buffer_rows || p.buffer_bytes < static_cast<uint64_t>(p.buffer_rows) * mem.row_bytes()) {
                return gufo_set_error(GUFO_E_REJECTED, "the piece is short: " + std::to_string(p.buffer_bytes) + " bytes for " + std::to_string(p.buffer_rows) + " rows");
            }
            if (p.first != next || p.first + p.n > r.tokens.size()) {
                return gufo_set_error(GUFO_E_REJECTED, "rows [" + std::to_string(p.first) + ", " + std::to_string(p.first + p.n) + ") do not continue at row " + std::to_string(next));
            }
            next = p.first + p.n;
        }
        r.touched_rows = next;
        for (uint32_t i = 0; i < n_pieces;) {
            const gufo_piece & p = pieces[i];
            const uint32_t run = run_length(pieces + i, n_pieces - i);
            const auto * src = static_cast<const uint8_t *>(p.buffer);
            const size_t stride = run > 1 ? static_cast<size_t>(static_cast<const uint8_t *>(pieces[i + 1].buffer) - src) : 0;
            for (const gufo::row_tensor & t : mem.rows(slot)) {
                r.io->in_blocks(t.tensor, p.first * t.row_bytes, src, p.n * t.row_bytes, run, stride);
                src += p.buffer_rows * t.row_bytes;
            }
            i += run;
        }
        r.next_row = next;
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_load_row_bytes(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, uint32_t buffer_rows, uint64_t offset,
                        const void * data, uint64_t n_bytes) {
    return guarded_load(state, slot, [&] {
        restore_progress & r = state->restoring(slot);
        gufo::memory & mem = state->stateful();
        if (first != r.next_row || n > buffer_rows || first + n > r.tokens.size() || offset != r.piece_bytes) {
            return gufo_set_error(GUFO_E_REJECTED, "bytes at " + std::to_string(offset) + " of rows [" + std::to_string(first) + ", " + std::to_string(first + n) +
                                                       ") do not continue at byte " + std::to_string(r.piece_bytes) + " of row " + std::to_string(r.next_row));
        }
        require_trusted_parts(r);
        const uint64_t total = static_cast<uint64_t>(buffer_rows) * mem.row_bytes();
        if (offset + n_bytes > total) {
            return gufo_set_error(GUFO_E_REJECTED, "the piece is longer than its " + std::to_string(total) + " bytes");
        }
        r.touched_rows = first + n;
        const auto * src = static_cast<const uint8_t *>(data);
        uint64_t begin = 0;  // of this tensor's rows in the packed piece
        for (const gufo::row_tensor & t : mem.rows(slot)) {
            const uint64_t wanted_end = begin + static_cast<uint64_t>(n) * t.row_bytes;
            const uint64_t from = std::max(offset, begin);
            const uint64_t to = std::min(offset + n_bytes, wanted_end);
            if (from < to) {
                r.io->in(t.tensor, first * t.row_bytes + (from - begin), src + (from - offset), to - from);
            }
            begin += static_cast<uint64_t>(buffer_rows) * t.row_bytes;
        }
        r.io->finish();
        r.piece_bytes = offset + n_bytes;
        if (r.piece_bytes == total) {
            r.piece_bytes = 0;
            r.next_row = first + n;
        }
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_load_private(gufo_state * state, uint32_t slot, const void * buffer, uint64_t buffer_bytes) {
    return guarded_load(state, slot, [&] {
        restore_progress & r = state->restoring(slot);
        const uint64_t need = state->stateful().private_bytes();
        if (buffer_bytes != need) {
            return gufo_set_error(GUFO_E_REJECTED, "the private state has " + std::to_string(buffer_bytes) + " bytes, this layout has " + std::to_string(need));
        }
        if (r.private_state) {
            if (r.private_state->fed() > 0) {
                return gufo_set_error(GUFO_E_REJECTED, "the private state was given already");
            }
            r.private_state->feed(*r.io, static_cast<const uint8_t *>(buffer), buffer_bytes);
        }
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_load_private_bytes(gufo_state * state, uint32_t slot, uint64_t offset, const void * data, uint64_t n_bytes) {
    return guarded_load(state, slot, [&] {
        restore_progress & r = state->restoring(slot);
        if (!r.private_state || offset != r.private_state->fed()) {
            return gufo_set_error(GUFO_E_REJECTED, "private bytes at " + std::to_string(offset) + " do not continue what was given");
        }
        require_trusted_parts(r);
        r.private_state->feed(*r.io, static_cast<const uint8_t *>(data), n_bytes);
        r.io->finish();
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_finish_restore(gufo_state * state, uint32_t slot) {
    return guarded_load(state, slot, [&] {
        restore_progress & r = state->restoring(slot);
        gufo::memory & mem = state->stateful();
        const auto n = static_cast<uint32_t>(r.tokens.size());
        if (r.next_row != n) {
            return gufo_set_error(GUFO_E_REJECTED, "only " + std::to_string(r.next_row) + " of " + std::to_string(n) + " rows were loaded");
        }
        if (r.private_state && !r.private_state->complete()) {
            return gufo_set_error(GUFO_E_REJECTED, "the private state was not loaded");
        }
        mem.set_cells(slot, r.tokens.data(), n);
        const int32_t at = mem.position(slot);
        if (at != static_cast<int32_t>(n)) {
            return gufo_set_error(GUFO_E_REJECTED, "the slot is at token " + std::to_string(at) + " instead of " + std::to_string(n));
        }
        r = restore_progress();
        return static_cast<int>(GUFO_OK);
    });
}

int gufo_abort_restore(gufo_state * state, uint32_t slot) {
    return guarded([&] {
        state->check_slot(slot);
        state->empty_slot(slot);
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
