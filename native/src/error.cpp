// error.cpp - the calling thread's last message.
#include "error.h"

static thread_local std::string last_message;

int gufo_set_error(int code, const std::string & msg) {
    if (code == GUFO_OK) {
        last_message.clear();
    } else {
        last_message = msg.empty() ? "an error without a message" : msg;
    }
    return code;
}

extern "C" const char * gufo_last_error(void) {
    return last_message.c_str();
}
