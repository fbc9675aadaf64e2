// template_clock.h - the date that a chat template sees, pinned while it renders.
//
// Templates print today's date into the system prompt; rendered with the real clock, midnight would
// change the first tokens of every conversation and make its whole cache useless.
#pragma once

#include <cstdint>
#include <string>

namespace gufo {

// While this object lives, strftime_now() in templates rendered by this thread formats `unix_s`
// (seconds since 1970, shown as local time).  Not to be nested.
class pinned_clock {
public:
    explicit pinned_clock(int64_t unix_s);
    ~pinned_clock();
    pinned_clock(const pinned_clock &) = delete;
    pinned_clock & operator=(const pinned_clock &) = delete;
};

// `unix_s` as local time in strftime notation.
std::string format_time(int64_t unix_s, const std::string & format);

// Makes strftime_now() look for a pinned clock; called once before the first template is parsed.
void install_template_clock();

}  // namespace gufo
