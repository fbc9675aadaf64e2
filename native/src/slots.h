// slots.h - what one gufo_state knows of its slots; shared by state.cpp (run, give) and restore.cpp (take).
//
// What a slot may do is decided here, once: a slot that is being restored neither runs nor gives
// state, and it becomes executable only when every component is complete and at one boundary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "gufo.h"
#include "llama-context.h"
#include "llama.h"
#include "memory.h"
#include "private_loader.h"
#include "transfer.h"

namespace gufo {

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

}  // namespace gufo

struct gufo_state {
    llama_context * ctx;
    uint32_t n_slots;
    std::unique_ptr<gufo::memory> mem;  // null: this kind runs, but gives no state
    std::vector<gufo::restore_progress> restore;
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
    gufo::restore_progress & restoring(uint32_t slot) {
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
            gufo::restore_progress & r = restore[slot];
            for (const gufo::row_tensor & t : mem->rows(slot)) {
                if (r.touched_rows > r.keep) {
                    r.io->zero(t.tensor, r.keep * t.row_bytes, (r.touched_rows - r.keep) * t.row_bytes);
                }
            }
            if (r.private_state) {
                r.private_state->wipe(*r.io);
            }
        }
        restore[slot] = gufo::restore_progress();
        output[slot] = -1;
        if (mem) {
            mem->truncate(slot, 0);
        } else if (llama_memory_t m = llama_get_memory(ctx)) {
            llama_memory_seq_rm(m, static_cast<llama_seq_id>(slot), -1, -1);
        }
    }
};
