// error.h - how a failure leaves the library: a code, and a message kept per thread.
//
// Every exported function runs its body through guarded(), so no C++ exception crosses the C
// boundary (ctypes would abort the process).  Rejected: an error object per handle, because the
// calls that fail earliest have no handle yet.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "gufo.h"

// Keeps the message for gufo_last_error() on this thread and returns the code, so that a body can
// say `return gufo_set_error(GUFO_E_INVALID, "...")`.  GUFO_OK clears the message.
int gufo_set_error(int code, const std::string & msg);

// A failure whose code is known where it is found, deep inside a body run by guarded().
class gufo_failure : public std::runtime_error {
public:
    gufo_failure(int code, const std::string & msg) : std::runtime_error(msg), code_(code) {}
    int code() const { return code_; }

private:
    int code_;
};

// Runs f (returning int) and turns what it throws into a code: a gufo_failure keeps its own, bad
// arguments are GUFO_E_INVALID, everything else is llama.cpp's failure.
template <typename F> int guarded(F && f) {
    try {
        return std::forward<F>(f)();
    } catch (const gufo_failure & e) {
        return gufo_set_error(e.code(), e.what());
    } catch (const std::invalid_argument & e) {
        return gufo_set_error(GUFO_E_INVALID, e.what());
    } catch (const std::bad_alloc &) {
        return gufo_set_error(GUFO_E_BACKEND, "out of memory");
    } catch (const std::exception & e) {
        return gufo_set_error(GUFO_E_BACKEND, e.what());
    } catch (...) {
        return gufo_set_error(GUFO_E_BACKEND, "an unknown exception");
    }
}

// The same for functions that return a handle: nullptr on failure.
template <typename F> auto guarded_ptr(F && f) -> decltype(f()) {
    decltype(f()) result = nullptr;
    guarded([&] {
        result = f();
        return GUFO_OK;
    });
    return result;
}
