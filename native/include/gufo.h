// gufo.h - the C boundary of the overlay: everything Python reaches of llama.cpp's insides.
//
// Opaque handles; int results are 0 or a GUFO_E_* code, and gufo_last_error() then holds the
// message of the calling thread.  No exception and no llama.cpp struct crosses this boundary:
// a llama_model * / llama_context * comes in as the pointer the llama-cpp-python bindings hold.
// All calls on one context come from one thread.
#ifndef GUFO_H
#define GUFO_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define GUFO_API __declspec(dllexport)
#else
#define GUFO_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define GUFO_ABI_VERSION 1

enum gufo_status {
    GUFO_OK = 0,
    GUFO_E_INVALID = 1,       // an argument is out of range; the message names it
    GUFO_E_UNSUPPORTED = 2,   // this memory kind or setting cannot be saved exactly
    GUFO_E_NOT_READY = 3,     // the slot is between begin and finish of a restore
    GUFO_E_REJECTED = 4,      // a payload failed its checks
    GUFO_E_FULL = 5,          // the batch does not fit the context
    GUFO_E_BACKEND = 6,       // llama.cpp failed
    GUFO_E_ABORTED = 7        // the abort callback stopped the computation
};

GUFO_API int gufo_abi_version(void);
GUFO_API const char * gufo_last_error(void);

// ---- state (state.cpp) -----------------------------------------------------------------------
//
// A gufo_state watches over one context made with kv_unified = false and flash attention on.
// Slot s is sequence s.  Row j of a slot is the state of its token j.
//
//     begin_restore -> load_rows* -> load_private? -> finish_restore      (or abort_restore)
//
// Between begin and finish the slot is not executable and gives no state.

typedef struct gufo_state gufo_state;

struct gufo_component {
    char id[64];
    char dtype[16];
    int32_t is_rows;   // 1: append-only rows; 0: private state
    uint32_t layout;   // version of the byte layout
    uint64_t n_bytes;  // per row, or in all
};

// Messages of llama.cpp below this level are dropped (1 debug .. 4 error); the others go to stderr.
GUFO_API void gufo_log_level(int min_level);
// The newest warning or error llama.cpp printed, as text; empty when none. For error messages.
GUFO_API const char * gufo_last_log(void);

// NULL with GUFO_E_UNSUPPORTED in *status when this memory kind cannot be saved exactly;
// gufo_run_open then still gives a handle that can run, but has no components.
GUFO_API gufo_state * gufo_state_open(void * llama_context_ptr, uint32_t n_slots, int * status);
GUFO_API gufo_state * gufo_run_open(void * llama_context_ptr, uint32_t n_slots, int * status);
GUFO_API void gufo_state_close(gufo_state * state);

GUFO_API const char * gufo_memory_kind(const gufo_state * state);
GUFO_API uint32_t gufo_n_components(const gufo_state * state);
GUFO_API int gufo_get_component(const gufo_state * state, uint32_t index, struct gufo_component * out);
GUFO_API uint64_t gufo_row_bytes(const gufo_state * state);
GUFO_API uint64_t gufo_private_bytes(const gufo_state * state);

// One pass over n tokens; tokens of one slot are contiguous, slots ascending. want[i] != 0 asks for
// logits after token i. GUFO_E_FULL: nothing was changed. Other errors: the slots are in doubt.
GUFO_API int gufo_decode(gufo_state * state, uint32_t n, const int32_t * tokens, const uint32_t * slots, const int8_t * want);
// n_vocab floats after the slot's last wanted token of the last decode.
GUFO_API int gufo_logits(gufo_state * state, uint32_t slot, float * out, uint64_t n_floats);
// The batch index to sample the slot from, or -1.
GUFO_API int32_t gufo_output_index(const gufo_state * state, uint32_t slot);
GUFO_API int gufo_position(gufo_state * state, uint32_t slot, int32_t * out);
// Positions of all parts (attention, indexer, window, recurrent: those that exist), at most n.
GUFO_API int gufo_positions(gufo_state * state, uint32_t slot, int32_t * out, uint32_t n, uint32_t * n_out);
GUFO_API int gufo_truncate(gufo_state * state, uint32_t slot, int32_t n_tokens);
// Empties every slot and zeroes the buffers (the cure for a state that holds NaN).
GUFO_API int gufo_clear_all(gufo_state * state);

GUFO_API int gufo_rows_out(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, void * out, uint64_t out_bytes);
GUFO_API int gufo_private_out(gufo_state * state, uint32_t slot, void * out, uint64_t out_bytes);

GUFO_API int gufo_begin_restore(gufo_state * state, uint32_t slot, const int32_t * tokens, uint32_t n_tokens, uint32_t keep_rows);
// The first n rows of a packed buffer of buffer_rows rows; pieces in ascending order without gaps.
GUFO_API int gufo_load_rows(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, const void * buffer, uint64_t buffer_bytes,
                            uint32_t buffer_rows);
GUFO_API int gufo_load_private(gufo_state * state, uint32_t slot, const void * buffer, uint64_t buffer_bytes);
GUFO_API int gufo_finish_restore(gufo_state * state, uint32_t slot);
GUFO_API int gufo_abort_restore(gufo_state * state, uint32_t slot);

// Bookkeeping of a slot as llama.cpp would write it (cells, positions, extras). *n_out = its size.
GUFO_API int gufo_metadata(gufo_state * state, uint32_t slot, void * out, uint64_t out_bytes, uint64_t * n_out);

// Host memory for transfers: pinned where the model's device offers it. Owned by the caller.
typedef struct gufo_host_memory gufo_host_memory;
GUFO_API gufo_host_memory * gufo_host_alloc(gufo_state * state, uint64_t n_bytes);
GUFO_API void * gufo_host_ptr(gufo_host_memory * memory);
GUFO_API int gufo_host_is_pinned(const gufo_host_memory * memory);
GUFO_API void gufo_host_free(gufo_host_memory * memory);

// ---- sampler (sampler.cpp) -------------------------------------------------------------------

// ---- chat templates (chat.cpp) ---------------------------------------------------------------

#ifdef __cplusplus
}
#endif
#endif
