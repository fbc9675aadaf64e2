// json_util.h - arguments and results of the exported functions: fields of a request, strings out.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "error.h"
#include "json.h"

namespace gufo {

using json = common_json;

[[noreturn]] inline void bad_field(const char * name, const std::string & reason) {
    throw gufo_failure(GUFO_E_INVALID, std::string(name) + ": " + reason);
}

inline void require(const void * pointer, const char * name) {
    if (!pointer) {
        throw gufo_failure(GUFO_E_INVALID, std::string(name) + " is null");
    }
}

// Absent and null both mean the default, as llama-server reads its requests.
inline bool has(const json & j, const char * name) {
    return j.contains(name) && !j.at(name).is_null();
}

inline void read(const json & j, const char * name, bool & out) {
    if (has(j, name)) {
        if (!j.at(name).is_boolean()) {
            bad_field(name, "must be a boolean");
        }
        out = j.at(name).get<bool>();
    }
}

inline void read(const json & j, const char * name, float & out) {
    if (has(j, name)) {
        if (!j.at(name).is_number()) {
            bad_field(name, "must be a number");
        }
        out = static_cast<float>(j.at(name).get<double>());
    }
}

inline void read(const json & j, const char * name, int32_t & out, int32_t min = std::numeric_limits<int32_t>::min()) {
    if (has(j, name)) {
        if (!j.at(name).is_number_integer()) {
            bad_field(name, "must be an integer");
        }
        const auto value = j.at(name).get<int64_t>();
        if (value < min || value > std::numeric_limits<int32_t>::max()) {
            bad_field(name, "must lie in [" + std::to_string(min) + ", 2147483647], but is " + std::to_string(value));
        }
        out = static_cast<int32_t>(value);
    }
}

inline void read(const json & j, const char * name, std::string & out) {
    if (has(j, name)) {
        if (!j.at(name).is_string()) {
            bad_field(name, "must be a string");
        }
        out = j.at(name).get<std::string>();
    }
}

inline void read(const json & j, const char * name, std::vector<std::string> & out) {
    if (has(j, name)) {
        if (!j.at(name).is_array()) {
            bad_field(name, "must be an array of strings");
        }
        out.clear();
        for (const auto & item : j.at(name)) {
            if (!item.is_string()) {
                bad_field(name, "must be an array of strings");
            }
            out.push_back(item.get<std::string>());
        }
    }
}

inline json parse_object(const char * text) {
    if (!text) {
        throw gufo_failure(GUFO_E_INVALID, "the JSON text is null");
    }
    json j = json::parse(text);
    if (!j.is_object()) {
        throw gufo_failure(GUFO_E_INVALID, "the JSON text is not an object");
    }
    return j;
}

// A copy for the caller, who gives it back to gufo_string_free().
inline void give_string(const std::string & text, char ** out) {
    auto * copy = static_cast<char *>(std::malloc(text.size() + 1));
    if (!copy) {
        throw std::bad_alloc();
    }
    std::memcpy(copy, text.c_str(), text.size() + 1);
    *out = copy;
}

}  // namespace gufo
