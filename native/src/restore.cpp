// restore.cpp - the C surface of slots: take state.
//
//     begin_restore -> load_* (in order, whole or in parts) -> finish_restore      (or abort_restore)
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "pieces.h"
#include "slots.h"

using gufo::restore_progress;

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
            const gufo::piece_run run = gufo::first_run(pieces + i, n_pieces - i);
            const auto * src = static_cast<const uint8_t *>(p.buffer);
            for (const gufo::row_tensor & t : mem.rows(slot)) {
                r.io->in_blocks(t.tensor, p.first * t.row_bytes, src, p.n * t.row_bytes, run.n, run.stride);
                src += p.buffer_rows * t.row_bytes;
            }
            i += run.n;
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

int gufo_wait_restore(gufo_state * state, uint32_t slot) {
    return guarded([&] {
        state->restoring(slot).io->finish();
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

}  // extern "C"
