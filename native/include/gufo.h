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

// ---- sampler (sampler.cpp) -------------------------------------------------------------------

// ---- chat templates (chat.cpp) ---------------------------------------------------------------

#ifdef __cplusplus
}
#endif
#endif
