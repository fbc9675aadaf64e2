// printed.cpp - see printed.h.
#include "printed.h"

#include "chat-auto-parser.h"
#include "json_util.h"

namespace gufo {

namespace {

// Roles and arguments as nearly all templates take them.
json shaped(json messages, const jinja::caps & caps) {
    for (auto & message : messages) {
        if (message.at("role") == "developer") {
            message["role"] = "system";
        }
        if (!message.contains("tool_calls")) {
            continue;
        }
        if (caps.supports_tool_calls && !message.contains("content")) {
            message["content"] = "";
        }
        for (auto & call : message["tool_calls"]) {
            auto & function = call["function"];
            if (caps.supports_object_arguments && function.contains("arguments") && function["arguments"].is_string()) {
                function["arguments"] = json::parse(function["arguments"].get<std::string>());
            }
        }
    }
    return messages;
}

}  // namespace

std::string piece_of(const llama_vocab * vocab, llama_token token) {
    return !vocab || token == LLAMA_TOKEN_NULL ? "" : common_token_to_piece(vocab, token, true);
}

printer::printer(const std::string & source, const std::string & tool_source, const llama_vocab * vocab) {
    const std::string bos = piece_of(vocab, vocab ? llama_vocab_bos(vocab) : LLAMA_TOKEN_NULL);
    const std::string eos = piece_of(vocab, vocab ? llama_vocab_eos(vocab) : LLAMA_TOKEN_NULL);
    plain_.emplace(source, bos, eos);
    if (!tool_source.empty()) {
        with_tools_.emplace(tool_source, bos, eos);
    }
    add_bos_ = vocab && llama_vocab_get_add_bos(vocab);
    add_eos_ = vocab && llama_vocab_get_add_eos(vocab);
}

std::string printer::print(const common_chat_templates_inputs & in) const {
    autoparser::generation_params params;
    params.tools = common_chat_tools_to_json_oaicompat(in.tools);
    const common_chat_template & chosen = params.tools.is_array() && with_tools_ ? *with_tools_ : *plain_;
    params.messages = shaped(common_chat_msgs_to_json_oaicompat(in.messages), chosen.original_caps());
    params.enable_thinking = in.enable_thinking;
    params.add_generation_prompt = in.add_generation_prompt;
    params.now = in.now;
    params.add_bos = add_bos_;
    params.add_eos = add_eos_;
    params.extra_context = json::object();
    for (const auto & [name, value] : in.chat_template_kwargs) {
        params.extra_context[name] = json::parse(value);
    }
    return common_chat_template_direct_apply(chosen, params);
}

}  // namespace gufo
