// quiet.cpp - see quiet.h.  libllama's and ggml's own log is another one (gufo_log_level).
#include "quiet.h"

#include <mutex>

#include "log.h"

void gufo_quiet_common() {
    static std::once_flag once;
    std::call_once(once, [] { common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT - 1); });
}
