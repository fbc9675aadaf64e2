// grammar_check.cpp - parses a grammar rule by rule, so that the reason of a refusal is known.
//
// llama.cpp's parser reports to stderr, together with the whole grammar, and returns nothing but
// failure; a client needs the reason and a log must not get the text.  Its rule parser is public
// and throws the reason, so this walks the rules with it.  Rejected: redirecting stderr (process
// wide), and a parser of our own (two grammars would be accepted).
#include "grammar_check.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "error.h"
#include "grammar_ways.h"
#include "llama-grammar.h"

namespace {

constexpr size_t MAX_MESSAGE = 200;  // the parser appends the unread rest of the grammar
constexpr int MAX_DEPTH = 256;       // it recurses per parenthesis; a real grammar nests a few deep

[[noreturn]] void refuse(const std::string & reason) {
    std::string text = "grammar: " + reason;
    if (text.size() > MAX_MESSAGE) {
        size_t cut = MAX_MESSAGE;
        while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) {
            cut--;  // not within a UTF-8 sequence
        }
        text = text.substr(0, cut) + "...";
    }
    throw gufo_failure(GUFO_E_INVALID, text);
}

const char * skip_blank(const char * pos) {
    while (*pos == ' ' || *pos == '\t' || *pos == '\r' || *pos == '\n' || *pos == '#') {
        if (*pos != '#') {
            pos++;
            continue;
        }
        while (*pos && *pos != '\n' && *pos != '\r') {
            pos++;
        }
    }
    return pos;
}

// At "{m,n}": the parser subtracts without asking which is larger, and then repeats for ever.
void check_repetition(const char * pos) {
    char * end = nullptr;
    const auto least = std::strtoull(skip_blank(pos + 1), &end, 10);
    const char * comma = skip_blank(end);
    const char * most = *comma == ',' ? skip_blank(comma + 1) : "";
    if (std::isdigit(static_cast<unsigned char>(*most)) && std::strtoull(most, nullptr, 10) < least) {
        refuse("a repetition of at least " + std::to_string(least) + " times, and at most fewer");
    }
}

// Parentheses and repetitions outside literals, character classes and comments.
void check_marks(const std::string & text) {
    int depth = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"' || c == '[') {
            const char close = c == '"' ? '"' : ']';
            for (i++; i < text.size() && text[i] != close; i++) {
                if (text[i] == '\\') {
                    i++;
                }
            }
        } else if (c == '#') {
            i = std::min(text.find('\n', i), text.size());
        } else if (c == '(' && ++depth > MAX_DEPTH) {
            refuse("parentheses nested deeper than " + std::to_string(MAX_DEPTH));
        } else if (c == ')') {
            depth--;
        } else if (c == '{') {
            check_repetition(text.c_str() + i);
        }
    }
}

}  // namespace

void gufo_check_grammar(const llama_vocab * vocab, const std::string & text) {
    if (text.find('\0') != std::string::npos) {
        refuse("contains a NUL character");
    }
    if (text.compare(0, 11, "%llguidance") == 0) {
        refuse("llguidance grammars are not part of this build; use GBNF");
    }
    check_marks(text);

    llama_grammar_parser parser(vocab);
    try {
        const char * pos = skip_blank(text.c_str());
        while (*pos) {
            pos = parser.parse_rule(pos);
        }
    } catch (const std::exception & e) {
        refuse(e.what());
    }
    if (parser.rules.empty()) {
        refuse("has no rules");
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        refuse("has no rule named 'root'");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            refuse("rule '" + name + "' is used but not defined");
        }
    }
    const std::string reason = gufo_grammar_ways(parser.rules);
    if (!reason.empty()) {
        refuse(reason);
    }
}
