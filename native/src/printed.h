// printed.h - a conversation as its template alone prints it, once.
//
// common_chat_templates_apply() runs a template three times and makes a grammar and a parser of what it finds;
// whoever wants to know only what the text would be needs none of that.  Messages are brought into the shape that
// templates expect as upstream does it for all formats, and not adapted to the few formats that it knows by name:
// whether that matters for a template is for the caller to find out, by comparing the two.
#pragma once

#include <optional>
#include <string>

#include "chat.h"

namespace gufo {

// The text of a token; empty without a vocabulary or for a token that it does not have.
std::string piece_of(const llama_vocab * vocab, llama_token token);

class printer {
public:
    // source, tool_source: as common_chat_templates_source() gives them; the latter may be empty.
    printer(const std::string & source, const std::string & tool_source, const llama_vocab * vocab);

    // Throws what the template raises.  `chat_template_kwargs` must hold the dates, if it prints any.
    std::string print(const common_chat_templates_inputs & in) const;

private:
    std::optional<common_chat_template> plain_;
    std::optional<common_chat_template> with_tools_;
    bool add_bos_ = false;
    bool add_eos_ = false;
};

}  // namespace gufo
