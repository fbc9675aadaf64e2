// chat_parser.cpp - a model's output as a message: content, reasoning, tool calls, while it grows.
//
// The whole text is parsed again with every piece and compared with the message before, as
// llama-server does; what goes out are the differences.  Differences from it: the name of a tool
// call leaves only when it is complete, text that is not in the expected format never fails (it
// comes back as content), and what was already sent is never taken back.
#include <algorithm>
#include <memory>
#include <set>

#include "chat.h"
#include "error.h"
#include "gufo.h"
#include "json_util.h"
#include "quiet.h"

using gufo::json;
using gufo::read;

struct gufo_chat_parser {
    common_chat_parser_params params;
    std::vector<std::string> thinking_end_tags;
    std::string text;
    common_chat_msg message;    // of all text so far, as far as it could be parsed
    common_chat_msg prefilled;  // what the prompt already holds of it
    std::set<size_t> announced; // tool calls whose name was sent
    bool unparsed = false;      // the final text is not in the expected format
};

namespace {

constexpr int MAX_CUTS = 256;  // attempts to find where the text left the format

json to_json(const common_chat_msg_diff & d) {
    json out = json::object();
    if (!d.reasoning_content_delta.empty()) {
        out["reasoning_content"] = d.reasoning_content_delta;
    }
    if (!d.content_delta.empty()) {
        out["content"] = d.content_delta;
    }
    if (d.tool_call_index != std::string::npos) {
        out["tool_call"] = json{
            { "index", static_cast<int64_t>(d.tool_call_index) },
            { "id", d.tool_call_delta.id },
            { "name", d.tool_call_delta.name },
            { "arguments", d.tool_call_delta.arguments },
        };
    }
    return out;
}

// `found` with everything behind it as content: reasoning and content are stretches of the text, in
// this order.
common_chat_msg as_text(const gufo_chat_parser & p, const common_chat_msg & found) {
    common_chat_msg msg;
    msg.role = "assistant";
    msg.reasoning_content = found.reasoning_content;
    size_t from = 0;
    if (!msg.reasoning_content.empty()) {
        const size_t at = p.text.find(msg.reasoning_content);
        if (at != std::string::npos) {
            from = at + msg.reasoning_content.size();
            for (const auto & tag : p.thinking_end_tags) {
                const size_t end = p.text.find(tag, from);
                if (end != std::string::npos) {
                    from = end + tag.size();
                    break;
                }
            }
        }
    }
    const std::string & content = found.content;
    const size_t at = content.empty() ? std::string::npos : p.text.find(content, from);
    msg.content = at == std::string::npos ? content + p.text.substr(from) : p.text.substr(at);
    return msg;
}

bool begins_with(const std::string & text, const std::string & prefix) {
    return text.compare(0, prefix.size(), prefix) == 0;
}

// Can `next` follow on what was sent?  A piece more can make the parser place less.
bool extends(const common_chat_msg & next, const common_chat_msg & sent) {
    if (!begins_with(next.content, sent.content) || !begins_with(next.reasoning_content, sent.reasoning_content) ||
        next.tool_calls.size() < sent.tool_calls.size()) {
        return false;
    }
    for (size_t i = 0; i < sent.tool_calls.size(); i++) {
        if (!begins_with(next.tool_calls[i].name, sent.tool_calls[i].name) ||
            !begins_with(next.tool_calls[i].arguments, sent.tool_calls[i].arguments)) {
            return false;
        }
    }
    return true;
}

// The end may trim what was sent already.
void keep_sent(std::string & next, const std::string & sent) {
    if (begins_with(sent, next)) {
        next = sent;
    }
}

// What the format can place of the text before the failure, which begins where a marker does.
common_chat_msg before_failure(const gufo_chat_parser & p) {
    size_t cut = p.text.size();
    for (int tries = 0; tries < MAX_CUTS && cut > 0; tries++) {
        cut = p.text.find_last_of("<[{", cut - 1);
        if (cut == std::string::npos) {
            break;
        }
        try {
            common_chat_msg msg = common_chat_parse(p.text.substr(0, cut), true, p.params);
            if (!msg.empty() && extends(msg, p.message)) {
                return msg;
            }
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception &) {
        }
    }
    return p.message;
}

common_chat_msg parse(gufo_chat_parser & p, bool is_final) {
    try {
        common_chat_msg msg = common_chat_parse(p.text, !is_final, p.params);
        msg.role = "assistant";
        return msg.empty() && !is_final ? p.message : msg;
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception &) {
        if (!is_final) {
            return p.message;  // perhaps the next piece makes it one
        }
    }
    p.unparsed = true;
    if (!p.announced.empty()) {
        return p.message;
    }
    return as_text(p, before_failure(p));
}

// The tool calls' names first and whole, then arguments only.
void push_tool_delta(gufo_chat_parser & p, const common_chat_msg & msg, common_chat_msg_diff d, bool is_final,
                     json & out) {
    const size_t index = d.tool_call_index;
    if (p.announced.count(index) == 0) {
        const bool complete = is_final || !d.tool_call_delta.arguments.empty() || index + 1 < msg.tool_calls.size();
        if (!complete || msg.tool_calls[index].name.empty()) {
            return;
        }
        d.tool_call_delta = msg.tool_calls[index];
        p.announced.insert(index);
    } else {
        if (d.tool_call_delta.arguments.empty()) {
            return;
        }
        d.tool_call_delta.name.clear();
        d.tool_call_delta.id.clear();
    }
    out.push_back(to_json(d));
}

void push_pending_names(gufo_chat_parser & p, const common_chat_msg & msg, size_t n_calls, json & out) {
    for (size_t i = 0; i < n_calls; i++) {
        if (p.announced.count(i) == 0 && !msg.tool_calls[i].name.empty()) {
            common_chat_msg_diff d;
            d.tool_call_index = i;
            d.tool_call_delta = msg.tool_calls[i];
            p.announced.insert(i);
            out.push_back(to_json(d));
        }
    }
}

json feed(gufo_chat_parser & p, bool is_final) {
    json out = json::array();
    common_chat_msg next = parse(p, is_final);
    if (is_final) {
        keep_sent(next.content, p.message.content);
        keep_sent(next.reasoning_content, p.message.reasoning_content);
        for (size_t i = 0; i < std::min(next.tool_calls.size(), p.message.tool_calls.size()); i++) {
            keep_sent(next.tool_calls[i].arguments, p.message.tool_calls[i].arguments);
        }
    }
    if (!extends(next, p.message)) {
        if (!is_final) {
            return out;
        }
        p.unparsed = true;
        next = p.message;
    }
    for (const auto & d : common_chat_msg_diff::compute_diffs(p.message, next)) {
        if (d.tool_call_index != std::string::npos) {
            push_pending_names(p, next, d.tool_call_index, out);
            push_tool_delta(p, next, d, is_final, out);
        } else {
            out.push_back(to_json(d));
        }
    }
    if (is_final) {
        push_pending_names(p, next, next.tool_calls.size(), out);
    }
    p.message = next;
    return out;
}

// Text of a continued message without the part that the request brought.
std::string without(const std::string & text, const std::string & prefix) {
    return begins_with(text, prefix) ? text.substr(prefix.size()) : text;
}

}  // namespace

extern "C" {

gufo_chat_parser * gufo_chat_parser_new(const char * params_json) {
    return guarded_ptr([&] {
        gufo_quiet_common();
        const json j = gufo::parse_object(params_json);
        auto p = std::make_unique<gufo_chat_parser>();
        int32_t format = COMMON_CHAT_FORMAT_CONTENT_ONLY;
        std::string reasoning_format = "auto";
        std::string arena;
        bool echo = false;
        read(j, "format", format, 0);
        if (format >= COMMON_CHAT_FORMAT_COUNT) {
            gufo::bad_field("format", "is not an output format");
        }
        read(j, "reasoning_format", reasoning_format);
        read(j, "generation_prompt", p->params.generation_prompt);
        read(j, "parse_tool_calls", p->params.parse_tool_calls);
        read(j, "is_continuation", p->params.is_continuation);
        read(j, "echo", echo);
        read(j, "thinking_end_tags", p->thinking_end_tags);
        read(j, "parser", arena);
        p->params.format = static_cast<common_chat_format>(format);
        p->params.reasoning_format = common_reasoning_format_from_name(reasoning_format);
        p->params.echo = echo;
        if (!arena.empty()) {
            p->params.parser.load(arena);
        }
        p->message.role = "assistant";
        if (p->params.is_continuation && !echo) {
            p->prefilled = common_chat_parse("", true, p->params);
            p->message = p->prefilled;
            p->message.role = "assistant";
        }
        return p.release();
    });
}

void gufo_chat_parser_free(gufo_chat_parser * p) {
    delete p;
}

int gufo_chat_parser_feed(gufo_chat_parser * p, const char * text, size_t n_bytes, int is_final, char ** out) {
    return guarded([&] {
        gufo::require(p, "parser");
        p->text.append(text, n_bytes);
        gufo::give_string(feed(*p, is_final != 0).dump_safe(), out);
        return int(GUFO_OK);
    });
}

int gufo_chat_parser_message(const gufo_chat_parser * p, char ** out) {
    return guarded([&] {
        gufo::require(p, "parser");
        json calls = json::array();
        for (const auto & call : p->message.tool_calls) {
            calls.push_back(json{ { "id", call.id }, { "name", call.name }, { "arguments", call.arguments } });
        }
        json msg = json::object();
        msg["content"] = without(p->message.content, p->prefilled.content);
        msg["reasoning_content"] = without(p->message.reasoning_content, p->prefilled.reasoning_content);
        msg["tool_calls"] = calls;
        msg["unparsed"] = p->unparsed;
        gufo::give_string(msg.dump_safe(), out);
        return int(GUFO_OK);
    });
}

}  // extern "C"
