// error.cpp - the calling thread's last message.
#include "error.h"

static thread_local std::string last_message;
static thread_local int last_status = GUFO_OK;

int gufo_set_error(int code, const std::string & msg) {
    last_status = code;
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

extern "C" int gufo_last_status(void) {
    return last_status;
}
