// quiet.h - what llama.cpp's `common` library may print.
#pragma once

// Nothing: its messages quote prompts, grammars and model output to stderr, and whatever they report
// comes back to our callers as an error anyway.  Called by every constructor that reaches `common`.
void gufo_quiet_common();
