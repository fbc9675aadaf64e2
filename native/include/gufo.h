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

// Bytes of host memory that a context's tensors and compute buffers take; the model's are not counted.
GUFO_API uint64_t gufo_host_bytes(const void * llama_context_ptr);

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

// A range of rows in a packed host buffer: its first n of buffer_rows rows are [first, first + n).
struct gufo_piece {
    void * buffer;
    uint64_t region;  // names the allocation the buffer lies in; any numbers that differ between allocations
    uint64_t buffer_bytes;
    uint32_t first;
    uint32_t n;
    uint32_t buffer_rows;
};

// Buffers of whole pieces (n == buffer_rows); all are filled when the call returns. Buffers at one
// distance in one region are one copy per tensor: on a device, thousands of calls less.
GUFO_API int gufo_pieces_out(gufo_state * state, uint32_t slot, const struct gufo_piece * pieces, uint32_t n_pieces);
GUFO_API int gufo_rows_out(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, void * out, uint64_t out_bytes);
GUFO_API int gufo_private_out(gufo_state * state, uint32_t slot, void * out, uint64_t out_bytes);

// trusted != 0: the payloads are what this library gave out, checked against damage since; otherwise
// everything that comes in is searched for NaN.
GUFO_API int gufo_begin_restore(gufo_state * state, uint32_t slot, const int32_t * tokens, uint32_t n_tokens, uint32_t keep_rows,
                                int trusted);
// Pieces in ascending order without gaps. On a device the copies are queued: the buffers (and that of
// load_private) must stay as they are until finish or abort.
GUFO_API int gufo_load_pieces(gufo_state * state, uint32_t slot, const struct gufo_piece * pieces, uint32_t n_pieces);
// The same in parts, for reading from a disk through a small buffer: bytes [offset, offset + n_bytes)
// of the packed piece, ascending without gaps; copied when the call returns. Only in a trusted restore
// (a part may end within a value); what was loaded before its checksum failed, NaN perhaps, is zeroed
// by gufo_abort_restore.
GUFO_API int gufo_load_row_bytes(gufo_state * state, uint32_t slot, uint32_t first, uint32_t n, uint32_t buffer_rows, uint64_t offset,
                                 const void * data, uint64_t n_bytes);
GUFO_API int gufo_load_private_bytes(gufo_state * state, uint32_t slot, uint64_t offset, const void * data, uint64_t n_bytes);
GUFO_API int gufo_load_private(gufo_state * state, uint32_t slot, const void * buffer, uint64_t buffer_bytes);
// Waits for queued copies; the buffers given so far may then be reused.
GUFO_API int gufo_wait_restore(gufo_state * state, uint32_t slot);
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
// One request's sampler: the chain, the grammar and the reasoning budget, with llama-server's field
// names in a JSON object (fields and defaults: native/src/sampler_params.cpp).  Its state is rebuilt
// from tokens for each request and never stored.  GUFO_E_INVALID messages begin with the name of the
// offending field and a colon.
typedef struct gufo_sampler gufo_sampler;

GUFO_API int gufo_last_status(void);  // of this thread's last failure: the code behind a NULL handle
GUFO_API gufo_sampler * gufo_sampler_new(const void * model, const char * params_json);  // NULL: failed
GUFO_API void gufo_sampler_free(gufo_sampler * sampler);
GUFO_API gufo_sampler * gufo_sampler_clone(const gufo_sampler * sampler);  // with the drawing state
GUFO_API int gufo_sampler_reset(gufo_sampler * sampler);  // as new, with the same effective seed

// Prompt tokens (is_generated = 0) feed the penalties only; generated ones the grammar too.
GUFO_API int gufo_sampler_accept(gufo_sampler * sampler, const int32_t * tokens, size_t n, int is_generated);

// Draws the next token (not accepted yet) from the logits of output row `row` of a context
// (llama_get_logits_ith: batch index, or -1 for the last), or from a vector of n_vocab logits.
// Equal logits and equal history give equal tokens by either way.
GUFO_API int gufo_sampler_sample(gufo_sampler * sampler, void * ctx, int32_t row, int32_t * token);
GUFO_API int gufo_sampler_sample_logits(gufo_sampler * sampler, const float * logits, int32_t n_vocab, int32_t * token);

// The most likely candidates that the chain left at the last draw, best first; *n <= n_max.
GUFO_API int gufo_sampler_candidates(const gufo_sampler * sampler, int32_t n_max, int32_t * ids, float * probs, int32_t * n);

GUFO_API uint32_t gufo_sampler_seed(const gufo_sampler * sampler);  // the effective one, never "random"
GUFO_API int gufo_sampler_end_reasoning(gufo_sampler * sampler, int * done);  // force the budget's end sequence
// Tokens whose text must appear in the output although they are special; *n is their number.
GUFO_API int gufo_sampler_preserved(const gufo_sampler * sampler, int32_t * out, size_t n_max, size_t * n);

// Log-softmax over plain logits: the n_top most likely tokens, best first (ties: lower id first),
// and the log-probability of `token` (< 0: not asked for); logprobs.cpp.
GUFO_API int gufo_logprobs(const float * logits, int32_t n_vocab, int32_t token, int32_t n_top, int32_t * top_ids,
                           float * top_logprobs, float * token_logprob);

GUFO_API int gufo_schema_to_grammar(const char * schema_json, char ** out);  // JSON schema -> GBNF
GUFO_API void gufo_string_free(char * text);  // every char ** result of this header

// ---- chat templates (chat.cpp) ---------------------------------------------------------------
// Templates of a model, or the one given.  Render takes a JSON object {messages, tools, tool_choice,
// parallel_tool_calls, json_schema, grammar, add_generation_prompt, continue_final_message,
// reasoning_format, enable_thinking, chat_template_kwargs, now} and gives {prompt, generation_prompt,
// format, parser, grammar, grammar_lazy, grammar_triggers, preserved_tokens, additional_stops,
// supports_thinking, thinking_start_tag, thinking_end_tags, ...}.  `now` (unix seconds) is the date
// that templates print.  GUFO_E_INVALID: the request or the template refuses; "<field>: <reason>".
// `prompt_only` gives {prompt} as the template alone prints it: run once, no grammar and no parser, and messages
// not adapted to the few formats that llama.cpp knows by name (printed.h).
// Render changes nothing in the handle and may run in any thread.
typedef struct gufo_chat gufo_chat;

GUFO_API gufo_chat * gufo_chat_new(const void * model, const char * template_override);  // NULL: failed
GUFO_API void gufo_chat_free(gufo_chat * chat);
GUFO_API int gufo_chat_info(const gufo_chat * chat, const void * model, char ** out);  // source, caps, ...
GUFO_API int gufo_chat_render(const gufo_chat * chat, const char * request_json, char ** out);

// Output to message, growing.  Made from the rendered object (plus reasoning_format, echo).  Each
// feed gives the differences as an array of {content | reasoning_content | tool_call: {index, id,
// name, arguments}}; message gives the whole so far.  Text out of format comes back as content.
typedef struct gufo_chat_parser gufo_chat_parser;

GUFO_API gufo_chat_parser * gufo_chat_parser_new(const char * params_json);  // NULL: failed
GUFO_API void gufo_chat_parser_free(gufo_chat_parser * parser);
GUFO_API int gufo_chat_parser_feed(gufo_chat_parser * parser, const char * text, size_t n_bytes, int is_final, char ** out);
GUFO_API int gufo_chat_parser_message(const gufo_chat_parser * parser, char ** out);

#ifdef __cplusplus
}
#endif
#endif
