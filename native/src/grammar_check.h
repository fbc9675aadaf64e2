// grammar_check.h - why a GBNF grammar is refused, as a message instead of a line on stderr.
#pragma once

#include <string>

struct llama_vocab;

// Throws gufo_failure(GUFO_E_INVALID) saying what is wrong and where.  Returning means that
// llama_sampler_init_grammar() will accept the text, except for left recursion, which only its
// own analysis finds.
void gufo_check_grammar(const llama_vocab * vocab, const std::string & text);
