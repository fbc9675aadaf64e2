// template_clock.cpp - replaces one entry of llama.cpp's table of template functions.
//
// common_chat_templates_inputs has a field `now`, but the template engine takes the time itself when
// a rendering starts.  The table of global functions is the one place between them that is reachable
// from outside: its nodes are ordinary heap objects, only the reference to the map is const.
// Rejected: rewriting template sources (formats may be computed, and special templates are recognised
// by their source), interposing time() (process wide), a patch of upstream.
#include "template_clock.h"

#include <ctime>
#include <mutex>
#include <optional>

#include "error.h"
#include "jinja/runtime.h"
#include "jinja/value.h"

namespace gufo {

static thread_local std::optional<int64_t> pinned;

pinned_clock::pinned_clock(int64_t unix_s) {
    pinned = unix_s;
}

pinned_clock::~pinned_clock() {
    pinned.reset();
}

std::string format_time(int64_t unix_s, const std::string & format) {
    const std::time_t seconds = static_cast<std::time_t>(unix_s);
    std::tm local = {};
#if defined(_WIN32)
    if (localtime_s(&local, &seconds) != 0) {
#else
    if (!localtime_r(&seconds, &local)) {
#endif
        throw gufo_failure(GUFO_E_INVALID, "now: is not a time");
    }
    char buffer[256];
    // 0 also means an empty result, for a format that prints nothing.
    const size_t n = std::strftime(buffer, sizeof(buffer), format.c_str(), &local);
    return std::string(buffer, n);
}

void install_template_clock() {
    static std::once_flag once;
    std::call_once(once, [] {
        const auto & table = jinja::global_builtins();
        const auto entry = table.find("strftime_now");
        if (entry == table.end()) {
            throw gufo_failure(GUFO_E_UNSUPPORTED, "this llama.cpp has no strftime_now to pin");
        }
        const_cast<jinja::func_handler &>(entry->second) = [](const jinja::func_args & args) -> jinja::value {
            args.ensure_vals<jinja::value_string>();
            const std::string format = args.get_pos(0)->as_string().str();
            const int64_t now = pinned ? *pinned : static_cast<int64_t>(args.ctx.current_time);
            return jinja::mk_val<jinja::value_string>(format_time(now, format));
        };
    });
}

}  // namespace gufo
