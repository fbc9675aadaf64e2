// grammar_ways.h - see grammar_ways.cpp.
#pragma once

#include <string>

#include "llama-grammar.h"

// Why llama.cpp would not come to an end with these rules, or not in reasonable time; "" = it will.
// Every symbol must have a rule.
std::string gufo_grammar_ways(const llama_grammar_rules & rules);
