// chat.cpp - chat templates: messages and tools in, prompt, grammar and output format out.
//
// A thin bridge to common_chat_*: JSON in, JSON out.  What a template refuses is GUFO_E_INVALID with
// the template's own words.  The model's templates are parsed one by one here, so that one broken
// variant does not take the other with it.
#include <cctype>
#include <memory>
#include <optional>

#include "chat.h"
#include "error.h"
#include "gufo.h"
#include "json_util.h"
#include "llama.h"
#include "printed.h"
#include "quiet.h"
#include "template_clock.h"

using gufo::has;
using gufo::json;
using gufo::read;

struct gufo_chat {
    common_chat_templates_ptr templates;
    std::optional<gufo::printer> printer;
};

namespace {

// The engine wraps what a template raises into the place where it happened, once or more.
std::string template_message(const std::string & what) {
    for (const char * mark : { "Jinja Exception: ", "\nError: " }) {
        const size_t at = what.rfind(mark);
        if (at != std::string::npos) {
            return what.substr(at + std::string(mark).size());
        }
    }
    return what;
}

common_chat_templates_inputs read_inputs(const json & j) {
    common_chat_templates_inputs in;
    if (!has(j, "messages")) {
        gufo::bad_field("messages", "is required");
    }
    try {
        in.messages = common_chat_msgs_parse_oaicompat(j.at("messages"));
    } catch (const std::exception & e) {
        gufo::bad_field("messages", e.what());
    }
    if (has(j, "tools")) {
        try {
            in.tools = common_chat_tools_parse_oaicompat(j.at("tools"));
        } catch (const std::exception & e) {
            // upstream appends all tools
            const std::string what = e.what();
            gufo::bad_field("tools", what.substr(0, what.find("; tools = ")));
        }
    }
    std::string tool_choice = "auto";
    std::string reasoning_format = "auto";
    read(j, "tool_choice", tool_choice);
    read(j, "reasoning_format", reasoning_format);
    try {
        in.tool_choice = common_chat_tool_choice_parse_oaicompat(tool_choice);
    } catch (const std::exception &) {
        gufo::bad_field("tool_choice", "must be auto, none or required, but is '" + tool_choice + "'");
    }
    try {
        in.reasoning_format = common_reasoning_format_from_name(reasoning_format);
    } catch (const std::exception &) {
        gufo::bad_field("reasoning_format",
                        "must be none, auto, deepseek or deepseek-legacy, but is '" + reasoning_format + "'");
    }
    if (has(j, "json_schema")) {
        in.json_schema = j.at("json_schema").dump();
    }
    read(j, "grammar", in.grammar);
    read(j, "parallel_tool_calls", in.parallel_tool_calls);
    read(j, "add_generation_prompt", in.add_generation_prompt);
    read(j, "enable_thinking", in.enable_thinking);
    if (has(j, "continue_final_message")) {
        in.continue_final_message = common_chat_continuation_parse(j.at("continue_final_message"));
    }
    return in;
}

// Template variables of the request; the dates that upstream would fill in from the real clock are
// given here, since variables win over them.
void read_variables(const json & j, std::optional<int64_t> now, common_chat_templates_inputs & in) {
    if (now) {
        in.now = std::chrono::system_clock::from_time_t(static_cast<std::time_t>(*now));
        in.chat_template_kwargs["datetime"] = json::make(gufo::format_time(*now, "%b %d %Y")).dump();
        in.chat_template_kwargs["date_string"] = json::make(gufo::format_time(*now, "%d %b %Y")).dump();
    }
    if (has(j, "chat_template_kwargs")) {
        const auto & variables = j.at("chat_template_kwargs");
        if (!variables.is_object()) {
            gufo::bad_field("chat_template_kwargs", "must be an object");
        }
        for (const auto & [name, value] : variables.items()) {
            in.chat_template_kwargs[name] = value.dump();
        }
    }
}

json rendered(const common_chat_params & p) {
    json triggers = json::array();
    for (const auto & trigger : p.grammar_triggers) {
        json item = { { "type", static_cast<int>(trigger.type) }, { "value", trigger.value } };
        if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN) {
            item["token"] = static_cast<int>(trigger.token);
        }
        triggers.push_back(item);
    }
    json out = json::object();
    out["prompt"] = p.prompt;
    out["generation_prompt"] = p.generation_prompt;
    out["format"] = static_cast<int>(p.format);
    out["format_name"] = common_chat_format_name(p.format);
    out["parser"] = p.parser;
    out["grammar"] = p.grammar;
    out["grammar_lazy"] = p.grammar_lazy;
    out["grammar_triggers"] = triggers;
    out["preserved_tokens"] = p.preserved_tokens;
    out["additional_stops"] = p.additional_stops;
    out["supports_thinking"] = p.supports_thinking;
    out["thinking_start_tag"] = p.thinking_start_tag;
    out["thinking_end_tags"] = p.thinking_end_tags;
    out["message_delimiters"] = p.message_delimiters.to_json();
    return out;
}

// common_chat_templates_init() logs why a template cannot be parsed and throws without it.
std::string parse_failure(const llama_model * model, const std::string & source) {
    const char * of_model = source.empty() && model ? llama_model_chat_template(model, nullptr) : nullptr;
    try {
        common_chat_template(of_model ? std::string(of_model) : source, "", "");
    } catch (const std::exception & e) {
        return e.what();
    }
    return "cannot be parsed";
}

}  // namespace

extern "C" {

gufo_chat * gufo_chat_new(const void * model, const char * template_override) {
    return guarded_ptr([&] {
        gufo_quiet_common();
        gufo::install_template_clock();
        const std::string source = template_override ? template_override : "";
        if (!model && source.empty()) {
            throw gufo_failure(GUFO_E_INVALID, "model: is null, and there is no template either");
        }
        auto chat = std::make_unique<gufo_chat>();
        const auto * llama = static_cast<const llama_model *>(model);
        try {
            chat->templates = common_chat_templates_init(llama, source);
        } catch (const std::exception &) {
            throw gufo_failure(GUFO_E_INVALID, "chat_template: " + parse_failure(llama, source));
        }
        const common_chat_templates * all = chat->templates.get();
        chat->printer.emplace(common_chat_templates_source(all), common_chat_templates_source(all, "tool_use"),
                              llama ? llama_model_get_vocab(llama) : nullptr);
        return chat.release();
    });
}

void gufo_chat_free(gufo_chat * chat) {
    delete chat;
}

int gufo_chat_info(const gufo_chat * chat, const void * model, char ** out) {
    return guarded([&] {
        gufo::require(chat, "chat");
        json info = json::object();
        info["source"] = common_chat_templates_source(chat->templates.get());
        info["tool_use_source"] = common_chat_templates_source(chat->templates.get(), "tool_use");
        info["explicit"] = common_chat_templates_was_explicit(chat->templates.get());
        info["caps"] = common_chat_templates_get_caps(chat->templates.get());
        bool thinking = false;
        try {
            thinking = common_chat_templates_support_enable_thinking(chat->templates.get());
        } catch (const std::exception &) {
            // The question is asked with a probe conversation, which a template may refuse.
        }
        info["supports_thinking"] = thinking;
        if (model) {
            const llama_vocab * vocab = llama_model_get_vocab(static_cast<const llama_model *>(model));
            info["bos_token"] = gufo::piece_of(vocab, llama_vocab_bos(vocab));
            info["eos_token"] = gufo::piece_of(vocab, llama_vocab_eos(vocab));
        }
        gufo::give_string(info.dump_safe(), out);
        return int(GUFO_OK);
    });
}

int gufo_chat_render(const gufo_chat * chat, const char * request_json, char ** out) {
    return guarded([&] {
        gufo::require(chat, "chat");
        const json j = gufo::parse_object(request_json);
        common_chat_templates_inputs in = read_inputs(j);
        std::optional<int64_t> now;
        if (has(j, "now")) {
            if (!j.at("now").is_number_integer()) {
                gufo::bad_field("now", "must be whole seconds since 1970");
            }
            now = j.at("now").get<int64_t>();
        }
        read_variables(j, now, in);
        bool prompt_only = false;
        read(j, "prompt_only", prompt_only);

        std::optional<gufo::pinned_clock> clock;
        if (now) {
            clock.emplace(*now);
        }
        json result = json::object();
        try {
            if (prompt_only) {
                result["prompt"] = chat->printer->print(in);
            } else {
                result = rendered(common_chat_templates_apply(chat->templates.get(), in));
                result["is_continuation"] = in.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
            }
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            throw gufo_failure(GUFO_E_INVALID, "messages: " + template_message(e.what()));
        }
        gufo::give_string(result.dump_safe(), out);
        return int(GUFO_OK);
    });
}

}  // extern "C"
