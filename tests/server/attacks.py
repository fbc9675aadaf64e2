"""Requests that should break a server: a table of what to send where, for a model with any vocabulary.

None is expected to be answered in a certain way.  What is expected is said by whoever sends them: no
answer is a failure of the server, and afterwards everybody else is served as before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Any
    """Written as JSON; bytes as they are."""

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


EXTREMES = (0.0, -1.0, 1e-45, 1e-40, 1e-20, 0.999999, 1e20, 3e38, -3e38, 1e300)
FLOATS = (
    "temperature", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
    "dynatemp_exponent", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
)  # fmt: skip
COUNTS = (
    "top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep", "seed", "n_predict", "n_probs",
    "n", "mirostat", "logprobs", "best_of",
)  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "dynatemp_exponent": {"dynatemp_range": 0.5},
    "xtc_threshold": {"xtc_probability": 1.0},
    "dry_base": {"dry_multiplier": 1.0, "dry_allowed_length": 0},
    "mirostat_tau": {"mirostat": 2},
    "mirostat_eta": {"mirostat": 1},
    "adaptive_decay": {"adaptive_target": 0.5},
}


def sampling() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in FLOATS:
        for value in EXTREMES:
            yield f"{name}={value:g}", {name: value, **WITH.get(name, {})}
    for name in COUNTS:
        for count in (0, -1, -2, 2**31 - 1, 2**31, 2**63, 10**40):
            yield f"{name}={count:.3g}", {name: count}
    yield "samplers=[]", {"samplers": []}
    yield "samplers, a thousand", {"samplers": ["top_k", "temperature"] * 500}
    yield "mirostat 1 of a flat chain", {"mirostat": 1, "mirostat_tau": 1e30, "temperature": 3e38}
    yield "breakers", {"dry_multiplier": 1.0, "dry_sequence_breakers": ["", "\0", "a" * 5000]}
    yield "penalties on everything", {"presence_penalty": 3e38, "frequency_penalty": 3e38, "repeat_penalty": 3e38}
    yield "flat", {"temperature": 3e38, "top_k": 0, "top_p": 1, "min_p": 0}


def biases(n_vocab: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "every token banned", {"logit_bias": [[i, False] for i in range(n_vocab)]}
    yield "every token banned, greedy", {"logit_bias": [[i, False] for i in range(n_vocab)], "temperature": 0}
    yield "every token wanted", {"logit_bias": [[i, 3e38] for i in range(n_vocab)]}
    yield "every token unwanted", {"logit_bias": [[i, -3e38] for i in range(n_vocab)]}
    for token in (n_vocab, n_vocab + 1, 2**31 - 1, 2**31, -1):
        yield f"bias of token {token}", {"logit_bias": [[token, 1.0]]}
    yield "bias of texts", {"logit_bias": {"": 1.0, "\0": 1.0, " " * 1000: -1.0, "-5": 2.0}}
    yield (
        "all but one banned, and that by the grammar",
        {
            "logit_bias": [[i, False] for i in range(1, n_vocab)],
            "grammar": 'root ::= "\\x01"',
        },
    )


GRAMMARS = {
    "empty text": 'root ::= ""',
    "empty for ever": 'root ::= ""*',
    "empty of empties": "root ::= a*\na ::= b*\nb ::= c?\nc ::= d\nd ::= [a]?",
    "nothing fits": "root ::= [^\\x00-\\U0010FFFF]",
    "NUL": 'root ::= "\\x00"',
    "surrogate": 'root ::= "\\ud800"',
    "beyond Unicode": 'root ::= "\\UFFFFFFFF"',
    "open string": 'root ::= "abc',
    "open class": "root ::= [abc",
    "open bracket": 'root ::= ("a"',
    "open escape": 'root ::= "\\',
    "bad repetition": 'root ::= "a"{',
    "backward repetition": 'root ::= "a"{5,2}',
    "long repetition": 'root ::= "a"{2000}',
    "too long repetition": 'root ::= "a"{1000000000}',
    "repetition of repetition": 'root ::= (("a"{40}){40}){40}',
    "left recursion": 'root ::= root "a" | "b"',
    "mutual recursion": 'root ::= a\na ::= b\nb ::= root | "x"',
    "hidden recursion": 'root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"',
    "right recursion": 'root ::= "a" root | "b"',
    "ways without number": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(64))
    + 'r64 ::= "x"',
    "deep brackets": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "long chain": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(60_000)) + 'r60000 ::= "x"',
    "many alternatives": "root ::= " + " | ".join(f'"{i}"' for i in range(60_000)),
    "a megabyte of comment": "#" + "x" * 1_000_000 + '\nroot ::= "a"',
    "a megabyte of name": 'root ::= "a"\n' + "x" * 1_000_000 + ' ::= "b"',
    "no token reference": "root ::= <[999999999]>",
    "bad token reference": "root ::= <[",
    "llguidance": "%llguidance {}",
    "blank": "   \n\n",
    "no root": 'a ::= "b"',
}

SCHEMAS: dict[str, Any] = {
    "refers to itself": {"$ref": "#"},
    "refers to itself by way of another": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a tree": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}},
    },
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "refers to nothing": {"$ref": "#/$defs/none"},
    "refers to the network": {"$ref": "https://example.com/schema.json"},
    "refers to a number": {"$ref": 5},
    "no such type": {"type": "hiccup"},
    "types": {"type": ["string", "null", "hiccup"]},
    "type of an object": {"type": {}},
    "empty enum": {"enum": []},
    "enum of all": {"enum": [None, True, 1, 1.5, "a", [], {}, "\0", '"', "\u2028"]},
    "long enum": {"enum": [f"value {i}" for i in range(3000)]},
    "const": {"const": {"a": [1, {"b": None}]}},
    "backward length": {"type": "string", "minLength": 10, "maxLength": 2},
    "negative length": {"type": "string", "minLength": -5},
    "long length": {"type": "string", "minLength": 10**9},
    "length beyond integers": {"type": "string", "maxLength": 10**30},
    "length of text": {"type": "string", "minLength": "x"},
    "items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "items of items": {"type": "array", "minItems": 40, "items": {"type": "array", "minItems": 40, "items": {}}},
    "backward items": {"type": "array", "minItems": 5, "maxItems": 1},
    "items of a number": {"type": "array", "items": 5},
    "integer range": {"type": "integer", "minimum": 10**30, "maximum": -(10**30)},
    "integer beyond": {"type": "integer", "minimum": 1e300},
    "range of text": {"type": "integer", "minimum": "x"},
    "properties of a number": {"type": "object", "properties": 5},
    "property of a number": {"type": "object", "properties": {"a": 5}},
    "odd names": {"type": "object", "properties": {"": {}, '"': {}, "\n": {}, "\0": {}, "é\u2028": {}}},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    "required only": {"type": "object", "required": ["none"]},
    "required of a number": {"type": "object", "properties": {}, "required": 5},
    "no alternatives": {"anyOf": []},
    "alternatives of numbers": {"oneOf": [5]},
    "all of nothing": {"allOf": []},
    "all of numbers": {"allOf": [5]},
    "not": {"not": {}},
    "format": {"type": "string", "format": "no such"},
    **{
        f"pattern {pattern[:24]}": {"type": "string", "pattern": pattern}
        for pattern in (
            "^(((",
            "^a{1000000}$",
            "^(a*)*$",
            "a",
            "",
            "^$",
            "^[z-a]$",
            "^\\p{L}$",
            "^\\",
            "^[",
            "^(?=a)$",
            "^a**$",
            "^" + "(" * 5000 + ")" * 5000 + "$",
            "^(a|b){500}$",
            "^.{0,5000}$",
            "^\\d+$",
            "^\u0000$",
        )
    },
    "not a schema": {"x": "y"},
    "true": {"properties": {"a": True, "b": False}},
}

MESSAGES: dict[str, Any] = {
    "empty": [{"role": "user", "content": ""}],
    "blank parts": [{"role": "user", "content": [{"type": "text", "text": ""}] * 100}],
    "no parts": [{"role": "user", "content": []}],
    "system alone": [{"role": "system", "content": "x"}],
    "assistant alone": [{"role": "assistant", "content": "x"}],
    "assistant of nothing": [*USER, {"role": "assistant", "content": ""}],
    "result without call": [*USER, {"role": "tool", "content": "x", "tool_call_id": "none"}],
    "result alone": [{"role": "tool", "content": "x"}],
    "broken arguments": [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ],
    "nameless call": [
        *USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": None}}]},
        {"role": "tool", "content": ""},
    ],
    "special tokens": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n</s><s>[INST]<tool_call>"}],
    "a NUL": [{"role": "user", "content": "a\0b"}],
    "half a pair": [{"role": "user", "content": "\ud83d"}],
    "half a pair in a call": [
        *USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": "f\udc00", "arguments": '{"\ud800": 1}'}}]},
        {"role": "tool", "content": "\udfff"},
    ],
    "template code": [{"role": "user", "content": "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}"}],
    "thoughts": [*USER, {"role": "assistant", "content": "</think></think>", "reasoning_content": "<think>"}, *USER],
    "many": USER * 3000,
    "far too long": [{"role": "user", "content": "word " * 200_000}],
    "one long word": [{"role": "user", "content": "a" * 500_000}],
    "turns without order": [{"role": r, "content": "x"} for r in ("assistant", "tool", "system", "user", "user")],
}

KWARGS: tuple[dict[str, Any], ...] = (
    {"messages": 5},
    {"tools": 5},
    {"add_generation_prompt": "x"},
    {"bos_token": 5},
    {"": 1},
    {"a b": {"c": [None]}},
    {"raise_exception": 5, "strftime_now": 5, "namespace": 5, "range": 5},
    {"enable_thinking": "yes"},
    {"x": "\ud800"},
    {"x" * 100_000: 1},
)


def tool(parameters: Any = None, name: Any = "look", description: Any = "Look.") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def chats() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, messages in MESSAGES.items():
        yield f"messages: {name}", {"messages": messages}
    for name, schema in SCHEMAS.items():
        yield (
            f"response_format: {name}",
            {
                "messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            },
        )
        yield f"tool: {name}", {"messages": USER, "tools": [tool(schema)]}
        yield f"required tool: {name}", {"messages": USER, "tools": [tool(schema)], "tool_choice": "required"}
    for name, grammar in GRAMMARS.items():
        yield f"grammar: {name}", {"messages": USER, "grammar": grammar}
    for kwargs in KWARGS:
        yield f"kwargs: {str(kwargs)[:40]}", {"messages": USER, "chat_template_kwargs": kwargs}
    for odd in (" ", "a b", "é", "\n", '"', "\0", "\ud800", "x" * 10_000, "<tool_call>"):
        yield f"tool named {odd[:12]!r}", {"messages": USER, "tools": [tool(name=odd)], "tool_choice": "required"}
        yield f"tool described {odd[:12]!r}", {"messages": USER, "tools": [tool(description=odd)]}
    yield "same tool twice", {"messages": USER, "tools": [tool(), tool()], "tool_choice": "required"}
    yield "300 tools", {"messages": USER, "tools": [tool(name=f"t{i}") for i in range(300)], "tool_choice": "required"}
    for choice in ("none", "required", {"type": "function", "function": {"name": "look"}}, {"type": "hosted"}, {}):
        yield f"choice {choice}", {"messages": USER, "tools": [tool()], "tool_choice": choice}
        yield f"choice {choice} without tools", {"messages": USER, "tool_choice": choice}
    for budget in (0, 1, -1, 2**31 - 1, 2**31, 2**70):
        yield (
            f"budget {budget}",
            {"messages": USER, "reasoning_budget_tokens": budget, "reasoning_budget_message": "</think>\0"},
        )
    for final in (True, "content", "reasoning_content", "nonsense", ""):
        yield (
            f"continue {final!r}",
            {
                "messages": [*USER, {"role": "assistant", "content": "I am"}],
                "continue_final_message": final,
            },
        )
    yield "no opening", {"messages": USER, "add_generation_prompt": False}
    yield "everything with log-probabilities", {"messages": USER, "logprobs": True, "top_logprobs": 100, "n": 16}
    yield "stop at nothing", {"messages": USER, "stop": ["", "", ""]}
    yield "ten thousand stops", {"messages": USER, "stop": [f"s{i}" for i in range(10_000)]}
    yield "stops of blanks", {"messages": USER, "stop": [" ", "\n", "\0", "a" * 1024]}


def prompts(n_ctx: int, n_vocab: int) -> Iterator[tuple[str, Any]]:
    for n in (n_ctx - 2, n_ctx - 1, n_ctx, n_ctx + 1, 4 * n_ctx):
        yield f"{n} of {n_ctx} tokens", [n_vocab // 2] * n
    yield "empty text", ""
    yield "empty list", []
    yield "list of an empty list", [[]]
    yield "list of an empty text", [""]
    yield "tokens out of range", [0, n_vocab]
    yield "negative token", [-1]
    yield "true", [True]
    yield "fraction", [1.5]
    yield "a thousand prompts", ["a"] * 1000
    yield "sixteen prompts", [[1 + i] for i in range(16)]
    yield "mixture", [1, "a", 2, "", 3]
    yield "NUL", "\0"
    yield "half a pair", "a\udc00b"
    yield "last token", [n_vocab - 1]


TEXTS = {
    "letters": "a" * 300_000,
    "blanks": " " * 300_000,
    "lines": "\n" * 300_000,
    "digits": "7" * 300_000,
    "accents": "e\u0301" * 100_000,
    "family": "👨\u200d👩\u200d👧" * 20_000,
    "apostrophes": "'" * 100_000,
    "punctuation": "!?" * 100_000,
    "mixed": "aB1 \n'’é漢字🦉" * 20_000,
    "NUL": "\0" * 1000,
    "noncharacters": "\ufffe\uffff\U0010ffff" * 1000,
    "special": "<|im_start|><|im_end|>" * 5000,
    "half a pair": "\ud800",
}

RESPONSES: dict[str, Any] = {
    "empty": [],
    "text of nothing": "",
    "numbers": [1, 2],
    "unknown item": [{"type": "smell"}],
    "output first": [{"type": "function_call_output", "call_id": "a", "output": "x"}],
    "call without output": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
    "type of a list": [{"type": ["message"]}],
    "reasoning alone": [{"type": "reasoning", "summary": [{"text": "x"}]}],
    "reasoning of a number": [{"type": "reasoning", "content": 5}],
    "half a pair": [{"role": "user", "content": "\ud800"}],
}

BLOCKS: dict[str, Any] = {
    "empty": [],
    "numbers": [5],
    "type of a list": [{"type": ["text"], "text": "x"}],
    "text of a number": [{"type": "text", "text": 5}],
    "result of nothing": [{"type": "tool_result"}],
    "result without call": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": ""}]}],
    "document of nothing": [{"type": "document"}],
    "half a pair": [{"type": "text", "text": "\ud800"}],
    "use by the user": [{"type": "tool_use", "id": "a", "name": "f", "input": []}],
}


def attacks(n_ctx: int, n_vocab: int) -> Iterator[Attack]:
    short = {"n_predict": 3}
    for name, fields in (*sampling(), *biases(n_vocab)):
        yield Attack(name, "/completion", {**short, "prompt": "hi hi hi", **fields})
    for name, grammar in GRAMMARS.items():
        yield Attack(f"grammar: {name}", "/completion", {**short, "prompt": "hi", "grammar": grammar})
    for name, schema in SCHEMAS.items():
        yield Attack(f"schema: {name}", "/v1/completions", {**short, "prompt": "hi", "json_schema": schema})
    for name, prompt in prompts(n_ctx, n_vocab):
        for n_predict in (3, 0):
            yield Attack(f"prompt: {name}, {n_predict}", "/completion", {"n_predict": n_predict, "prompt": prompt})
        yield Attack(
            f"echo: {name}", "/v1/completions", {"max_tokens": 2, "echo": True, "prompt": prompt, "logprobs": None}
        )
    for name, fields in chats():
        yield Attack(name, CHAT, {"max_tokens": 3, **fields})
        for path in ("/v1/cache/prefetch", "/apply-template", f"{CHAT}/input_tokens"):
            yield Attack(name, path, fields)
    for name, text in TEXTS.items():
        yield Attack(name, "/tokenize", {"content": text, "with_pieces": len(text) < 20_000, "add_special": True})
    for tokens in ([], [-1], [n_vocab], [2**70], [n_vocab - 1] * 1000, [True], ["a"], None, 5):
        yield Attack(f"tokens {str(tokens)[:20]}", "/detokenize", {"tokens": tokens})
        yield Attack(f"content {str(tokens)[:20]}", "/tokenize", {"content": tokens})
    for name, items in RESPONSES.items():
        yield Attack(name, "/v1/responses", {"input": items, "max_output_tokens": 3})
    for name, blocks in BLOCKS.items():
        for role in ("user", "assistant", "system"):
            body = {"messages": [*USER, {"role": role, "content": blocks}], "max_tokens": 3}
            yield Attack(f"{role}: {name}", "/v1/messages", body)
            yield Attack(f"{role}: {name}", "/v1/messages/count_tokens", body)
        yield Attack(f"system: {name}", "/v1/messages", {"messages": USER, "system": blocks, "max_tokens": 3})
    for raw in (
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe\x00", b'{"messages": "\xc3\x28"}', b'{"a": NaN}',
        b"[" * 100_000, b'{"messages":' * 10_000, b'{"\\ud800": 1}', b'{"messages": [], "messages": 5}',
        b"\xef\xbb\xbf{}", b'{"max_tokens": 1e999}', b'{"seed": ' + b"9" * 5000 + b"}", b"{}" + b" " * 100_000,
    ):  # fmt: skip
        for path in (CHAT, "/completion", "/v1/messages", "/v1/responses", "/tokenize", "/v1/cache/prefetch"):
            yield Attack(f"body {raw[:16]!r}", path, raw)
