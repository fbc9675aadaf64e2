// grammar_ways.cpp - how many ways lead from the beginning of a rule to its first terminal.
//
// llama.cpp walks all of them: looking for left recursion it remembers no rule it has seen (thirty
// rules of two alternatives each are 2^30 walks), and it keeps a stack per way.  It also overlooks
// recursion behind a rule that is empty by way of another, and then pushes without end.  All of that
// happens while every conversation waits, so a grammar is measured here first.
//
//     edge r -> s     r can begin with s: s is first in an alternative, or only after what can be empty
//     heavy edge      something follows s in the alternative, and would be pushed on the stack
//     ways of r       alternatives that begin with a terminal or are empty, and the ways of its edges
//
// Two graphs are measured: with the emptiness that llama.cpp sees (an empty alternative) and with the
// true one.  In the second a cycle without a heavy edge does no harm: its stacks are equal.
#include "grammar_ways.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr double MAX_WAYS = 4000;        // of one rule: as many stacks, compared pair by pair
constexpr double MAX_WAYS_IN_ALL = 5e6;  // steps of the search for left recursion
constexpr uint32_t MAX_CHAIN = 2000;     // that search recurses along edges, on a thread's stack
constexpr uint32_t NONE = UINT32_MAX;

const char * const LEFT_RECURSION = "a rule refers to itself at its own beginning (left recursion)";

struct edge {
    uint32_t to;
    bool heavy;
};

struct node {
    std::vector<edge> edges;
    double terminals = 0;
};

struct alternative {
    uint32_t rule;
    const llama_grammar_element * begin;
    const llama_grammar_element * end;
};

std::vector<alternative> alternatives_of(const llama_grammar_rules & rules) {
    std::vector<alternative> out;
    for (uint32_t r = 0; r < rules.size(); r++) {
        const auto * begin = rules[r].data();
        for (const auto & e : rules[r]) {
            if (e.type == LLAMA_GRETYPE_END || e.type == LLAMA_GRETYPE_ALT) {
                out.push_back({ r, begin, &e });
                begin = &e + 1;
            }
        }
    }
    return out;
}

// Which rules can be empty: only by an alternative without elements, or by whatever way.
std::vector<bool> empties(const std::vector<alternative> & alternatives, size_t n_rules, bool by_way_of_others) {
    std::vector<bool> out(n_rules, false);
    std::vector<size_t> missing(alternatives.size());
    std::vector<std::vector<uint32_t>> users(n_rules);
    std::vector<uint32_t> found;
    auto empty = [&](uint32_t rule) {
        if (!out[rule]) {
            out[rule] = true;
            found.push_back(rule);
        }
    };
    for (uint32_t a = 0; a < alternatives.size(); a++) {
        const auto & alt = alternatives[a];
        missing[a] = alt.end - alt.begin;
        if (missing[a] == 0) {
            empty(alt.rule);
        } else if (std::all_of(alt.begin, alt.end, [](const auto & e) { return e.type == LLAMA_GRETYPE_RULE_REF; })) {
            std::for_each(alt.begin, alt.end, [&](const auto & e) { users[e.value].push_back(a); });
        }
    }
    while (by_way_of_others && !found.empty()) {
        const uint32_t rule = found.back();
        found.pop_back();
        for (const uint32_t a : users[rule]) {
            if (--missing[a] == 0) {
                empty(alternatives[a].rule);
            }
        }
    }
    return out;
}

std::vector<node> graph_of(const std::vector<alternative> & alternatives, const std::vector<bool> & can_be_empty) {
    std::vector<node> nodes(can_be_empty.size());
    for (const auto & alt : alternatives) {
        auto & from = nodes[alt.rule];
        const auto * e = alt.begin;
        while (e != alt.end && e->type == LLAMA_GRETYPE_RULE_REF) {
            from.edges.push_back({ e->value, e + 1 != alt.end });
            if (!can_be_empty[e->value]) {
                break;
            }
            e++;
        }
        if (e == alt.end || e->type != LLAMA_GRETYPE_RULE_REF) {
            from.terminals += 1;
        }
    }
    return nodes;
}

// Tarjan's strongly connected components, without recursion; a component is complete before those
// that lead to it, so its figures can be summed at once.
class measurement {
public:
    measurement(const std::vector<node> & nodes, bool light_cycles) :
        nodes_(nodes), light_cycles_(light_cycles), index_(nodes.size(), NONE), low_(nodes.size()),
        component_(nodes.size(), NONE) {}

    std::string run() {
        for (uint32_t r = 0; r < nodes_.size() && reason_.empty(); r++) {
            if (index_[r] == NONE) {
                visit(r);
            }
        }
        if (reason_.empty() && in_all_ > MAX_WAYS_IN_ALL) {
            reason_ = "its rules can begin in too many ways";
        }
        return reason_;
    }

private:
    struct frame {
        uint32_t rule;
        size_t next;
    };

    void enter(uint32_t r) {
        index_[r] = low_[r] = count_++;
        open_.push_back(r);
        frames_.push_back({ r, 0 });
    }

    void visit(uint32_t start) {
        enter(start);
        while (!frames_.empty() && reason_.empty()) {
            auto & [r, next] = frames_.back();
            if (next < nodes_[r].edges.size()) {
                const uint32_t to = nodes_[r].edges[next++].to;
                if (index_[to] == NONE) {
                    enter(to);  // invalidates r and next
                } else if (component_[to] == NONE) {
                    low_[r] = std::min(low_[r], index_[to]);
                }
                continue;
            }
            const uint32_t done = r;
            frames_.pop_back();
            if (!frames_.empty()) {
                low_[frames_.back().rule] = std::min(low_[frames_.back().rule], low_[done]);
            }
            if (low_[done] == index_[done]) {
                close(done);
            }
        }
    }

    void close(uint32_t first) {
        const size_t from = std::find(open_.rbegin(), open_.rend(), first).base() - open_.begin() - 1;
        const std::vector<uint32_t> members(open_.begin() + from, open_.end());
        open_.resize(from);
        const auto id = static_cast<uint32_t>(ways_.size());
        for (const uint32_t r : members) {
            component_[r] = id;
        }
        double ways = 0;
        uint32_t chain = 0;
        for (const uint32_t r : members) {
            ways += nodes_[r].terminals;
            for (const auto & [to, heavy] : nodes_[r].edges) {
                if (component_[to] != id) {
                    ways += ways_[component_[to]];
                    chain = std::max(chain, chain_[component_[to]]);
                } else if (heavy || !light_cycles_) {
                    reason_ = LEFT_RECURSION;
                }
            }
        }
        chain += static_cast<uint32_t>(members.size());
        ways_.push_back(ways);
        chain_.push_back(chain);
        in_all_ += ways * static_cast<double>(members.size());
        if (ways > MAX_WAYS) {
            reason_ = "a rule can begin in more than " + std::to_string(static_cast<int>(MAX_WAYS)) + " ways";
        } else if (chain > MAX_CHAIN) {
            reason_ = "more than " + std::to_string(MAX_CHAIN) + " rules begin with one another";
        }
    }

    const std::vector<node> & nodes_;
    bool light_cycles_;
    std::vector<uint32_t> index_, low_, component_;
    std::vector<uint32_t> open_;
    std::vector<frame> frames_;
    std::vector<double> ways_;     // per component
    std::vector<uint32_t> chain_;  // rules from here to a terminal, at most
    double in_all_ = 0;
    uint32_t count_ = 0;
    std::string reason_;
};

}  // namespace

std::string gufo_grammar_ways(const llama_grammar_rules & rules) {
    const auto alternatives = alternatives_of(rules);
    for (const bool by_way_of_others : { false, true }) {
        const auto nodes = graph_of(alternatives, empties(alternatives, rules.size(), by_way_of_others));
        const std::string reason = measurement(nodes, by_way_of_others).run();
        if (!reason.empty()) {
            return reason;
        }
    }
    return "";
}
