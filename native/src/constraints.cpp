// constraints.cpp - made here from the request's parameters, because common_sampler keeps its own
// grammar and budget where no caller can reach them (sampler.cpp says why that matters).
#include "constraints.h"

#include <cctype>
#include <limits>

#include "grammar_check.h"
#include "json_util.h"
#include "reasoning-budget.h"

namespace gufo {

std::vector<llama_token> opening_tokens(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens = common_tokenize(vocab, text, false, true);
    if (!tokens.empty()) {
        const std::string piece = common_token_to_piece(vocab, tokens.front(), true);
        if (!piece.empty() && std::isspace(static_cast<unsigned char>(piece[0])) &&
            !std::isspace(static_cast<unsigned char>(text[0]))) {
            tokens.erase(tokens.begin());
        }
    }
    return tokens;
}

sampler_ptr make_grammar(const llama_vocab * vocab, const common_params_sampling & p,
                         const std::vector<llama_token> & opening) {
    const std::string & text = common_grammar_value(p.grammar);
    if (text.empty()) {
        return nullptr;
    }
    gufo_check_grammar(vocab, text);

    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;
    for (const auto & trigger : p.grammar_triggers) {
        switch (trigger.type) {
            case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:
                tokens.push_back(trigger.token);
                break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:
                patterns.push_back(regex_escape(trigger.value));
                break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
                patterns.push_back(trigger.value);
                break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: {
                const std::string & v = trigger.value;
                patterns.push_back((v.empty() || v.front() != '^' ? "^" : "") + v +
                                   (v.empty() || v.back() != '$' ? "$" : ""));
                break;
            }
        }
    }
    std::vector<const char *> pattern_ptrs;
    for (const auto & pattern : patterns) {
        pattern_ptrs.push_back(pattern.c_str());
    }

    sampler_ptr grammar;
    try {
        grammar.reset(p.grammar_lazy
                          ? llama_sampler_init_grammar_lazy_patterns(vocab, text.c_str(), "root", pattern_ptrs.data(),
                                                                     pattern_ptrs.size(), tokens.data(), tokens.size())
                          : llama_sampler_init_grammar(vocab, text.c_str(), "root"));
    } catch (const std::exception & e) {
        gufo::bad_field("grammar_triggers", e.what());
    }
    if (!grammar) {
        gufo::bad_field("grammar", "a rule refers to itself at its own beginning (left recursion)");
    }
    if (!p.grammar_lazy && common_grammar_needs_prefill(p.grammar)) {
        try {
            for (const llama_token token : opening) {
                llama_sampler_accept(grammar.get(), token);
            }
        } catch (const std::exception & e) {
            gufo::bad_field("grammar", std::string("does not accept the template's opening: ") + e.what());
        }
    }
    return grammar;
}

sampler_ptr make_budget(const llama_vocab * vocab, const common_params_sampling & p,
                        const std::vector<llama_token> & opening) {
    const bool wanted = p.grammar_lazy || p.reasoning_budget_tokens >= 0 || p.reasoning_control;
    if (p.reasoning_budget_start.empty() || p.reasoning_budget_end.empty() || !wanted) {
        return nullptr;
    }
    const int32_t n_max = p.reasoning_budget_tokens < 0 ? std::numeric_limits<int32_t>::max() : p.reasoning_budget_tokens;
    sampler_ptr budget(common_reasoning_budget_init(vocab, { p.reasoning_budget_start }, p.reasoning_budget_end,
                                                    p.reasoning_budget_forced, n_max));
    for (const llama_token token : opening) {
        llama_sampler_accept(budget.get(), token);
    }
    return budget;
}

}  // namespace gufo
