// sampler.cpp - one request's sampler: llama.cpp's chain, grammar and reasoning budget.
//
// llama-server samples through common_sampler_sample(), which takes its logits out of a context
// and asserts that they are there.  After a restore whose checkpoint carries the next-token logits
// there are none in the context, and the token must still be the one that the context would have
// given.  So both cases run through one path here, over a plain vector of logits:
//
//     candidates <- logits;  budget;  chain (ends with a draw)  -> token
//     token fits the grammar?  yes: done
//     no: candidates <- logits;  budget;  grammar;  chain       -> token
//
// which is common_sampler_sample()'s order, draws included.  The chain lives in a common_sampler
// made by common_sampler_init(); grammar and budget are ours (constraints.cpp).  "reference": true in the
// parameters leaves everything to common_sampler_sample(); tests compare the two.
// Rejected: writing stored logits into the context (private members, and a later decode in flight
// would own that buffer); a second sampler of our own design.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "constraints.h"
#include "error.h"
#include "gufo.h"
#include "json-schema-to-grammar.h"
#include "json_util.h"
#include "llama.h"
#include "quiet.h"
#include "reasoning-budget.h"
#include "sampler_params.h"
#include "sampling.h"

using gufo::sampler_ptr;

static sampler_ptr copy_of(const sampler_ptr & s) {
    return sampler_ptr(s ? llama_sampler_clone(s.get()) : nullptr);
}

// True when the chain can only choose the largest logit: nothing changes one, and the temperature is 0.
static bool takes_largest(const common_params_sampling & p) {
    return p.temp <= 0.0f && p.mirostat == 0 && p.logit_bias.empty() && p.penalty_repeat == 1.0f &&
           p.penalty_freq == 0.0f && p.penalty_present == 0.0f && p.dry_multiplier == 0.0f &&
           p.xtc_probability <= 0.0f && p.adaptive_target < 0.0f;
}

// The first of the largest; a NaN anywhere is returned as such (its index) for the caller to refuse.
static llama_token largest(const float * x, size_t n) {
    constexpr size_t lanes = 16;  // independent maxima, so that the compiler can use vectors
    float best[lanes];
    uint32_t nan[lanes] = {};  // as wide as a float: one vector compare
    std::fill(best, best + lanes, -INFINITY);
    const size_t whole = n - n % lanes;
    for (size_t i = 0; i < whole; i += lanes) {
        for (size_t k = 0; k < lanes; k++) {
            best[k] = x[i + k] > best[k] ? x[i + k] : best[k];
            nan[k] |= x[i + k] != x[i + k];
        }
    }
    float top = *std::max_element(best, best + lanes);
    bool bad = std::any_of(nan, nan + lanes, [](uint32_t n) { return n != 0; });
    for (size_t i = whole; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        bad |= std::isnan(x[i]);
    }
    return static_cast<llama_token>(
        bad ? std::find_if(x, x + n, [](float v) { return std::isnan(v); }) - x : std::find(x, x + n, top) - x);
}

struct gufo_sampler {
    const llama_vocab * vocab = nullptr;
    common_params_sampling params;
    bool reference = false;
    bool plain_greedy = false;
    common_sampler_ptr base;  // the chain; with `reference` also grammar and budget
    sampler_ptr grammar, budget;
    sampler_ptr grammar_fresh, budget_fresh;  // as before the first generated token, for reset
    std::vector<llama_token_data> candidates;
    llama_token_data_array view = { nullptr, 0, -1, false };

    size_t window() const {
        return static_cast<size_t>(std::max({ 64, params.n_prev, params.penalty_last_n, params.dry_penalty_last_n }));
    }

    // A lazy grammar sleeps while the model reasons: a tool call quoted there is not one.
    bool grammar_active() const {
        if (!grammar) {
            return false;
        }
        if (!budget || !params.grammar_lazy) {
            return true;
        }
        const auto state = common_reasoning_budget_get_state(budget.get());
        return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
    }

    bool grammar_allows(llama_token token) const {
        llama_token_data one = { token, 1.0f, 0.0f };
        llama_token_data_array array = { &one, 1, -1, false };
        llama_sampler_apply(grammar.get(), &array);
        return one.logit != -INFINITY;
    }

    void grammar_accept(llama_token token) {
        // llama.cpp ends the process when the text ends where the grammar does not.
        if (llama_vocab_is_eog(vocab, token) && !grammar_allows(token)) {
            throw gufo_failure(GUFO_E_INVALID, "grammar: the text may not end here");
        }
        try {
            llama_sampler_accept(grammar.get(), token);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception &) {  // its message quotes the output
            throw gufo_failure(GUFO_E_INVALID, "grammar: it does not allow token " + std::to_string(token) + " here");
        }
    }

    void accept(llama_token token, bool is_generated) {
        if (reference) {
            common_sampler_accept(base.get(), token, is_generated);
            return;
        }
        const bool active = is_generated && grammar_active();
        if (budget && is_generated) {
            llama_sampler_accept(budget.get(), token);
            // The sequence that ended the reasoning was hidden from the grammar, but may trigger it.
            if (grammar && !active && common_reasoning_budget_get_state(budget.get()) == REASONING_BUDGET_DONE) {
                if (const llama_tokens * end = common_reasoning_budget_get_end_match(budget.get())) {
                    for (const llama_token t : *end) {
                        grammar_accept(t);
                    }
                }
            }
        }
        if (active) {
            grammar_accept(token);
        }
        common_sampler_accept(base.get(), token, is_generated);
    }

    // The same choice as the chain's, without a table of all candidates (a vocabulary of 248,320: 0.9 ms).
    void draw_largest(const float * logits) {
        const llama_token token = largest(logits, candidates.size());
        candidates[0] = { token, logits[token], 1.0f };
        view = { candidates.data(), 1, 0, false };
    }

    void draw(const float * logits, bool grammar_first) {
        if (plain_greedy && !budget && !grammar_first) {
            draw_largest(logits);
        } else {
            draw_with_chain(logits, grammar_first);
        }
        if (view.selected < 0 || static_cast<size_t>(view.selected) >= view.size) {
            throw gufo_failure(GUFO_E_BACKEND, "the sampler chain selected no token");
        }
        if (std::isnan(view.data[view.selected].logit)) {
            throw gufo_failure(GUFO_E_BACKEND, "the logits are not numbers");
        }
    }

    void draw_with_chain(const float * logits, bool grammar_first) {
        for (size_t i = 0; i < candidates.size(); i++) {
            candidates[i] = { static_cast<llama_token>(i), logits[i], 0.0f };
        }
        view = { candidates.data(), candidates.size(), -1, false };
        if (budget) {
            llama_sampler_apply(budget.get(), &view);
        }
        if (grammar_first && grammar_active()) {
            llama_sampler_apply(grammar.get(), &view);
        }
        llama_sampler_apply(common_sampler_get(base.get()), &view);
    }

    llama_token sample(const float * logits) {
        draw(logits, false);
        llama_token token = view.data[view.selected].id;
        if (grammar_active() && !grammar_allows(token)) {
            draw(logits, true);
            token = view.data[view.selected].id;
            if (!grammar_allows(token)) {
                throw gufo_failure(GUFO_E_INVALID, "grammar: no token of the vocabulary can continue the text");
            }
        }
        return token;
    }
};

extern "C" {

gufo_sampler * gufo_sampler_new(const void * model_ptr, const char * params_json) {
    return guarded_ptr([&] {
        gufo_quiet_common();
        gufo::require(model_ptr, "model");
        const auto * model = static_cast<const llama_model *>(model_ptr);
        const auto j = gufo::parse_object(params_json);

        auto s = std::make_unique<gufo_sampler>();
        s->vocab = llama_model_get_vocab(model);
        s->params = gufo_sampling_params(model, j);
        gufo::read(j, "reference", s->reference);
        s->candidates.resize(llama_vocab_n_tokens(s->vocab));
        s->plain_greedy = takes_largest(s->params);

        common_params_sampling chain = s->params;
        const auto opening = gufo::opening_tokens(s->vocab, s->params.generation_prompt);
        if (!s->reference) {
            s->grammar_fresh = gufo::make_grammar(s->vocab, s->params, opening);
            s->budget_fresh = gufo::make_budget(s->vocab, s->params, opening);
            s->grammar = copy_of(s->grammar_fresh);
            s->budget = copy_of(s->budget_fresh);
            chain.grammar = {};
            chain.grammar_triggers.clear();
            chain.reasoning_budget_start.clear();
            chain.generation_prompt.clear();
        }
        s->base.reset(common_sampler_init(model, chain));
        return s.release();
    });
}

void gufo_sampler_free(gufo_sampler * s) {
    delete s;
}

gufo_sampler * gufo_sampler_clone(const gufo_sampler * s) {
    return guarded_ptr([&] {
        gufo::require(s, "sampler");
        auto copy = std::make_unique<gufo_sampler>();
        copy->vocab = s->vocab;
        copy->params = s->params;
        copy->reference = s->reference;
        copy->plain_greedy = s->plain_greedy;
        copy->base.reset(common_sampler_clone(s->base.get()));
        copy->grammar = copy_of(s->grammar);
        copy->budget = copy_of(s->budget);
        copy->grammar_fresh = copy_of(s->grammar_fresh);
        copy->budget_fresh = copy_of(s->budget_fresh);
        copy->candidates.resize(s->candidates.size());
        return copy.release();
    });
}

int gufo_sampler_reset(gufo_sampler * s) {
    return guarded([&] {
        gufo::require(s, "sampler");
        if (s->reference) {
            return gufo_set_error(GUFO_E_UNSUPPORTED, "a reference sampler cannot be reset");
        }
        common_sampler_reset(s->base.get());
        s->grammar = copy_of(s->grammar_fresh);
        s->budget = copy_of(s->budget_fresh);
        s->view = { nullptr, 0, -1, false };
        return int(GUFO_OK);
    });
}

int gufo_sampler_accept(gufo_sampler * s, const int32_t * tokens, size_t n, int is_generated) {
    return guarded([&] {
        gufo::require(s, "sampler");
        const auto n_vocab = static_cast<int32_t>(s->candidates.size());
        for (size_t i = 0; i < n; i++) {
            if (tokens[i] < 0 || tokens[i] >= n_vocab) {
                return gufo_set_error(GUFO_E_INVALID, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
            }
        }
        // Of a prompt only what the longest window can see changes anything.
        const size_t seen = is_generated ? n : std::min(n, s->window());
        for (size_t i = n - seen; i < n; i++) {
            s->accept(tokens[i], is_generated != 0);
        }
        return int(GUFO_OK);
    });
}

int gufo_sampler_sample(gufo_sampler * s, void * ctx_ptr, int32_t row, int32_t * token) {
    return guarded([&] {
        gufo::require(s, "sampler");
        gufo::require(ctx_ptr, "context");
        auto * ctx = static_cast<llama_context *>(ctx_ptr);
        if (llama_model_get_vocab(llama_get_model(ctx)) != s->vocab) {
            return gufo_set_error(GUFO_E_INVALID, "sampler and context belong to different models");
        }
        const float * logits = llama_get_logits_ith(ctx, row);  // waits for the computation
        if (!logits) {
            return gufo_set_error(GUFO_E_INVALID, "row: the last decode left no logits at row " + std::to_string(row));
        }
        *token = s->reference ? common_sampler_sample(s->base.get(), ctx, row) : s->sample(logits);
        return int(GUFO_OK);
    });
}

int gufo_sampler_sample_logits(gufo_sampler * s, const float * logits, int32_t n_vocab, int32_t * token) {
    return guarded([&] {
        gufo::require(s, "sampler");
        gufo::require(logits, "logits");
        if (s->reference) {
            return gufo_set_error(GUFO_E_UNSUPPORTED, "a reference sampler samples from a context only");
        }
        if (n_vocab != static_cast<int32_t>(s->candidates.size())) {
            return gufo_set_error(GUFO_E_INVALID, "n_vocab: " + std::to_string(n_vocab) + " logits for a vocabulary of " +
                                                      std::to_string(s->candidates.size()));
        }
        *token = s->sample(logits);
        return int(GUFO_OK);
    });
}

int gufo_sampler_candidates(const gufo_sampler * s, int32_t n_max, int32_t * ids, float * probs, int32_t * n) {
    return guarded([&] {
        gufo::require(s, "sampler");
        if (s->view.selected < 0) {
            return gufo_set_error(GUFO_E_INVALID, "nothing was sampled yet");
        }
        std::vector<llama_token_data> sorted(s->view.data, s->view.data + s->view.size);
        const size_t count = std::min(sorted.size(), static_cast<size_t>(std::max(n_max, 0)));
        std::partial_sort(sorted.begin(), sorted.begin() + count, sorted.end(),
                          [](const llama_token_data & a, const llama_token_data & b) {
                              return a.p != b.p ? a.p > b.p : a.id < b.id;
                          });
        for (size_t i = 0; i < count; i++) {
            ids[i] = sorted[i].id;
            probs[i] = sorted[i].p;
        }
        *n = static_cast<int32_t>(count);
        return int(GUFO_OK);
    });
}

uint32_t gufo_sampler_seed(const gufo_sampler * s) {
    return s ? s->params.seed : 0;
}

int gufo_sampler_end_reasoning(gufo_sampler * s, int * done) {
    return guarded([&] {
        gufo::require(s, "sampler");
        *done = s->budget && common_reasoning_budget_force(s->budget.get()) ? 1 : 0;
        return int(GUFO_OK);
    });
}

int gufo_sampler_preserved(const gufo_sampler * s, int32_t * out, size_t n_max, size_t * n) {
    return guarded([&] {
        gufo::require(s, "sampler");
        *n = s->params.preserved_tokens.size();
        size_t i = 0;
        for (const llama_token token : s->params.preserved_tokens) {
            if (i < n_max) {
                out[i++] = token;
            }
        }
        return int(GUFO_OK);
    });
}

int gufo_schema_to_grammar(const char * schema_json, char ** out) {
    return guarded([&] {
        gufo::require(schema_json, "schema");
        try {
            gufo::give_string(json_schema_to_grammar(gufo::json::parse(schema_json)), out);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            gufo::bad_field("json_schema", e.what());
        }
        return int(GUFO_OK);
    });
}

void gufo_string_free(char * text) {
    std::free(text);
}

}  // extern "C"
