// sampler_params.cpp - JSON to common_params_sampling, checked so that nothing reaches an assertion
// inside llama.cpp (which would end the process instead of the request).
#include "sampler_params.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "json_util.h"
#include "sampling.h"

using gufo::bad_field;
using gufo::has;
using gufo::json;
using gufo::read;

namespace {

constexpr int32_t WINDOW_MAX_MIN = 1 << 20;

// A window longer than any context sees the same tokens as one of the context's length, but is
// allocated in full: 2^31 - 1 would ask for 8 GiB.
int32_t window(const llama_model * model, int32_t n) {
    const int32_t n_ctx = llama_model_n_ctx_train(model);
    return n < 0 ? std::max(n_ctx, 0) : std::min(n, std::max(n_ctx, WINDOW_MAX_MIN));
}

uint32_t drawn_seed() {
    std::random_device source;
    uint32_t seed = LLAMA_DEFAULT_SEED;
    while (seed == LLAMA_DEFAULT_SEED) {
        seed = source();
    }
    return seed;
}

void read_seed(const json & j, uint32_t & seed) {
    seed = LLAMA_DEFAULT_SEED;
    if (has(j, "seed")) {
        if (!j.at("seed").is_number_integer()) {
            bad_field("seed", "must be an integer");
        }
        seed = static_cast<uint32_t>(j.at("seed").get<int64_t>());  // modulo 2^32; -1 = random
    }
    if (seed == LLAMA_DEFAULT_SEED) {
        seed = drawn_seed();
    }
}

void read_samplers(const json & j, std::vector<common_sampler_type> & samplers) {
    std::vector<std::string> names;
    if (!has(j, "samplers")) {
        return;
    }
    read(j, "samplers", names);
    samplers.clear();
    for (const auto & name : names) {
        const auto found = common_sampler_types_from_names({ name });
        if (found.empty()) {
            bad_field("samplers", "there is no sampler named '" + name + "'");
        }
        samplers.push_back(found.front());
    }
}

// [[token, bias], ...]; false as the bias bans the token, since JSON has no infinity.
void read_logit_bias(const json & j, int32_t n_vocab, std::vector<llama_logit_bias> & out) {
    if (!has(j, "logit_bias")) {
        return;
    }
    for (const auto & pair : j.at("logit_bias")) {
        if (!pair.is_array() || pair.size() != 2 || !pair.at(size_t(0)).is_number_integer()) {
            bad_field("logit_bias", "must be an array of [token, bias] pairs");
        }
        const auto token = pair.at(size_t(0)).get<int64_t>();
        const auto & bias = pair.at(size_t(1));
        if (token < 0 || token >= n_vocab) {
            bad_field("logit_bias", "token " + std::to_string(token) + " is not in the vocabulary of " +
                                        std::to_string(n_vocab) + " tokens");
        }
        if (bias.is_number()) {
            out.push_back({ static_cast<llama_token>(token), static_cast<float>(bias.get<double>()) });
        } else if (bias.is_boolean() && !bias.get<bool>()) {
            out.push_back({ static_cast<llama_token>(token), -INFINITY });
        } else {
            bad_field("logit_bias", "a bias must be a number, or false to ban the token");
        }
    }
}

common_grammar_type grammar_type(const std::string & name) {
    if (name.empty() || name == "user") {
        return COMMON_GRAMMAR_TYPE_USER;
    }
    if (name == "output_format") {
        return COMMON_GRAMMAR_TYPE_OUTPUT_FORMAT;
    }
    if (name == "tool_calls") {
        return COMMON_GRAMMAR_TYPE_TOOL_CALLS;
    }
    bad_field("grammar_type", "must be user, output_format or tool_calls");
}

// A trigger word that is one token triggers by the token, so that text which merely spells it
// does not; such a word has to be a preserved token or it would be swallowed in the output.
void read_triggers(const json & j, const llama_vocab * vocab, common_params_sampling & p) {
    std::vector<std::string> preserved;
    read(j, "preserved_tokens", preserved);
    for (const auto & text : preserved) {
        const auto ids = common_tokenize(vocab, text, false, true);
        if (ids.size() == 1) {
            p.preserved_tokens.insert(ids[0]);
        }
    }
    if (!has(j, "grammar_triggers")) {
        return;
    }
    for (const auto & item : j.at("grammar_triggers")) {
        common_grammar_trigger trigger;
        int32_t type = COMMON_GRAMMAR_TRIGGER_TYPE_WORD;
        read(item, "type", type, COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN);
        if (type > COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
            bad_field("grammar_triggers", "there is no trigger type " + std::to_string(type));
        }
        trigger.type = static_cast<common_grammar_trigger_type>(type);
        read(item, "value", trigger.value);
        if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN) {
            int32_t token = 0;
            read(item, "token", token, 0);
            trigger.token = token;
        } else if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
            const auto ids = common_tokenize(vocab, trigger.value, false, true);
            if (ids.size() == 1) {
                if (p.preserved_tokens.count(ids[0]) == 0) {
                    bad_field("grammar_triggers", "'" + trigger.value + "' must be a preserved token");
                }
                trigger.type = COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN;
                trigger.token = ids[0];
            }
        }
        p.grammar_triggers.push_back(std::move(trigger));
    }
}

void read_reasoning_budget(const json & j, const llama_vocab * vocab, common_params_sampling & p) {
    std::string start;
    std::vector<std::string> ends;
    read(j, "reasoning_budget_tokens", p.reasoning_budget_tokens, -1);
    read(j, "reasoning_control", p.reasoning_control);
    read(j, "reasoning_budget_message", p.reasoning_budget_message);
    read(j, "reasoning_budget_start_tag", start);
    read(j, "reasoning_budget_end_tags", ends);
    p.reasoning_budget_start = common_tokenize(vocab, start, false, true);
    for (const auto & end : ends) {
        auto ids = common_tokenize(vocab, end, false, true);
        if (!ids.empty()) {
            p.reasoning_budget_end.push_back(std::move(ids));
        }
    }
    if (!p.reasoning_budget_end.empty()) {
        p.reasoning_budget_forced = common_tokenize(vocab, p.reasoning_budget_message, false, true);
        const auto & end = p.reasoning_budget_end.front();
        p.reasoning_budget_forced.insert(p.reasoning_budget_forced.end(), end.begin(), end.end());
    }
}

void require_finite(const char * name, float value) {
    if (!std::isfinite(value)) {
        bad_field(name, "must be finite");
    }
}

}  // namespace

common_params_sampling gufo_sampling_params(const llama_model * model, const common_json & j) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    common_params_sampling p;
    p.no_perf = true;

    read(j, "temperature", p.temp);
    read(j, "top_k", p.top_k);
    read(j, "top_p", p.top_p);
    read(j, "min_p", p.min_p);
    read(j, "typical_p", p.typ_p);
    read(j, "top_n_sigma", p.top_n_sigma);
    read(j, "xtc_probability", p.xtc_probability);
    read(j, "xtc_threshold", p.xtc_threshold);
    read(j, "dynatemp_range", p.dynatemp_range);
    read(j, "dynatemp_exponent", p.dynatemp_exponent);
    read(j, "repeat_last_n", p.penalty_last_n, -1);
    read(j, "repeat_penalty", p.penalty_repeat);
    read(j, "presence_penalty", p.penalty_present);
    read(j, "frequency_penalty", p.penalty_freq);
    read(j, "dry_multiplier", p.dry_multiplier);
    read(j, "dry_base", p.dry_base);
    read(j, "dry_allowed_length", p.dry_allowed_length, 0);
    read(j, "dry_penalty_last_n", p.dry_penalty_last_n, -1);
    read(j, "dry_sequence_breakers", p.dry_sequence_breakers);
    read(j, "mirostat", p.mirostat, 0);
    read(j, "mirostat_tau", p.mirostat_tau);
    read(j, "mirostat_eta", p.mirostat_eta);
    read(j, "adaptive_target", p.adaptive_target);
    read(j, "adaptive_decay", p.adaptive_decay);
    read(j, "min_keep", p.min_keep, 0);
    read(j, "ignore_eos", p.ignore_eos);
    read_seed(j, p.seed);
    read_samplers(j, p.samplers);
    read_logit_bias(j, n_vocab, p.logit_bias);

    for (const auto & [name, value] : { std::pair<const char *, float>{ "temperature", p.temp },
                                        { "repeat_penalty", p.penalty_repeat },
                                        { "presence_penalty", p.penalty_present },
                                        { "frequency_penalty", p.penalty_freq },
                                        { "dry_multiplier", p.dry_multiplier } }) {
        require_finite(name, value);
    }
    if (!(p.penalty_repeat > 0.0f)) {
        bad_field("repeat_penalty", "must be greater than 0");
    }
    if (p.mirostat > 2) {
        bad_field("mirostat", "must be 0, 1 or 2");
    }
    if (!(p.adaptive_decay >= 0.0f && p.adaptive_decay <= 0.99f)) {
        bad_field("adaptive_decay", "must lie in [0, 0.99]");
    }
    if (p.dry_base < 1.0f) {
        p.dry_base = common_params_sampling().dry_base;
    }
    p.penalty_last_n = window(model, p.penalty_last_n);
    p.dry_penalty_last_n = window(model, p.dry_penalty_last_n);

    if (p.ignore_eos) {
        for (llama_token token = 0; token < n_vocab; token++) {
            if (llama_vocab_is_eog(vocab, token)) {
                p.logit_bias.push_back({ token, -INFINITY });
            }
        }
    }

    std::string grammar;
    std::string type;
    read(j, "grammar", grammar);
    read(j, "grammar_type", type);
    read(j, "grammar_lazy", p.grammar_lazy);
    read(j, "generation_prompt", p.generation_prompt);
    if (!grammar.empty()) {
        p.grammar = common_grammar(grammar_type(type), grammar);
    }
    read_triggers(j, vocab, p);
    if (p.grammar_lazy && !grammar.empty() && p.grammar_triggers.empty()) {
        bad_field("grammar_triggers", "a lazy grammar needs at least one trigger");
    }
    read_reasoning_budget(j, vocab, p);
    return p;
}
