// constraints.h - what may follow: grammar and reasoning budget as samplers of their own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common.h"
#include "llama.h"

namespace gufo {

struct sampler_free {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};
using sampler_ptr = std::unique_ptr<llama_sampler, sampler_free>;

// The template's assistant opening as tokens; a tokenizer may put a space in front of it, which
// the prompt does not have.
std::vector<llama_token> opening_tokens(const llama_vocab * vocab, const std::string & text);

// Each nullptr when the request has none.  Both start behind the opening: a format's grammar covers
// the whole answer, of which the template wrote the beginning; a user's grammar does not.
// Throw gufo_failure(GUFO_E_INVALID, "grammar...: <reason>").
sampler_ptr make_grammar(const llama_vocab * vocab, const common_params_sampling & p,
                         const std::vector<llama_token> & opening);
sampler_ptr make_budget(const llama_vocab * vocab, const common_params_sampling & p,
                        const std::vector<llama_token> & opening);

}  // namespace gufo
