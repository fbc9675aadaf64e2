"""Requests as coding agents send them: shapes and habits, written by hand.

Each agent gives the same five requests of one session, in order: the first turn, the turn after a tool
ran, a side request (a title), the compaction, and the first turn again (a retry).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

RULES = "You are a coding agent. Read before you write. Say what you did. " * 8
TASK = "Fix the failing test in tests/test_parser.py."
OUTPUT = "1 failed, 12 passed"
SUMMARIZE = "Summarize the conversation so far so that work can go on without it."
TITLE = "Give this conversation a title of at most six words."
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command."}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Agent:
    name: str
    path: str
    first: Body
    tool_turn: Body
    side: Body
    compaction: Body

    @property
    def requests(self) -> list[Body]:
        return [self.first, self.tool_turn, self.side, self.compaction, self.first]


def claude_code() -> Agent:
    def system(nonce: str) -> list[Body]:
        header = f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={nonce};"
        return [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]

    tools: list[Body] = [
        {"name": "Bash", "description": "Run a command.", "input_schema": PARAMETERS},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]
    common: Body = {
        "model": "claude-sonnet-4-5-20250929",
        "tools": tools,
        "metadata": {"user_id": "user_abc_account__session_123"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    reminder = {"type": "text", "text": "<system-reminder>\nThe current date is today.\n</system-reminder>"}
    user = {
        "role": "user",
        "content": [reminder, {"type": "text", "text": TASK, "cache_control": {"type": "ephemeral"}}],
    }
    call = {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "pytest -q"}}
    thought = {"type": "thinking", "thinking": "Run it first.", "signature": ""}
    result = {"tool_use_id": "toolu_01", "type": "tool_result", "content": OUTPUT, "is_error": False}
    # the mark moves to the newest message with every request, which must not change the older one's tokens
    past = {"role": "user", "content": [reminder, {"type": "text", "text": TASK}]}
    after = [
        past,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I run the test."}, call]},
        {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
    ]
    side = {
        "model": "claude-haiku-4-5",
        "max_tokens": 512,
        "temperature": 0,
        "stream": True,
        "system": [{"type": "text", "text": TITLE}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": TASK}]}],
        "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    return Agent(
        "claude-code",
        "/v1/messages?beta=true",
        {**common, "system": system("a5145"), "messages": [user]},
        {**common, "system": system("0ef01"), "messages": after},
        side,
        {**common, "system": system("77aa1"), "messages": [*after, {"role": "user", "content": SUMMARIZE}]},
    )


def codex() -> Agent:
    tools: list[Body] = [
        {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": PARAMETERS},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {"type": "web_search", "external_web_access": True},
    ]
    common: Body = {
        "model": "gpt-5-codex",
        "instructions": RULES,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }

    def message(role: str, text: str, kind: str = "input_text") -> Body:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    first = [message("developer", "<permissions>read only</permissions>"), message("user", TASK)]
    call = {"type": "function_call", "name": "shell", "arguments": '{"command":"pytest -q"}', "call_id": "call_1"}
    after = [
        *first,
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Run it."}],
            "content": None,
            "encrypted_content": None,
        },
        message("assistant", "I run the test.", "output_text"),
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": OUTPUT},
    ]
    side = {
        "model": "gpt-5-mini",
        "instructions": TITLE,
        "input": [message("user", TASK)],
        "stream": True,
        "store": False,
    }
    return Agent(
        "codex",
        "/v1/responses",
        {**common, "input": first},
        {**common, "input": after},
        side,
        {**common, "input": [*after, message("user", SUMMARIZE)]},
    )


def _chat(name: str, common: Body, first: list[Body], answer: list[Body], side: Body) -> Agent:
    after = [*first, *answer]
    return Agent(
        name,
        "/v1/chat/completions",
        {**common, "messages": first},
        {**common, "messages": after},
        side,
        {**common, "messages": [*after, {"role": "user", "content": SUMMARIZE}]},
    )


TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": PARAMETERS}}
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"pytest -q"}'}}]


def opencode() -> Agent:
    common: Body = {
        "model": "local/any",
        "max_tokens": 32000,
        "top_p": 1,
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
    }
    first = [{"role": "system", "content": RULES}, {"role": "user", "content": TASK}]
    answer: list[Body] = [
        {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "Run it."},
        {"role": "tool", "tool_call_id": "call_1", "content": OUTPUT},
    ]
    users = [{"role": "user", "content": text} for text in ("Generate a title:\n", TASK)]
    side = {
        "model": "local/any",
        "messages": [{"role": "system", "content": TITLE}, *users],
        "max_tokens": 1500,
        "stream": True,
    }
    return _chat("opencode", common, first, answer, side)


def cline() -> Agent:
    common: Body = {
        "model": "any",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": None,
    }

    def user(*texts: str) -> Body:
        return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}

    details = "<environment_details>\n# Visible files\ntests/test_parser.py\n</environment_details>"
    first = [{"role": "system", "content": RULES}, user(f"<task>\n{TASK}\n</task>", details)]
    call = "I run it.\n\n<execute_command>\n<command>pytest -q</command>\n</execute_command>"
    answer: list[Body] = [
        {"role": "assistant", "content": call},
        user(f"[execute_command for 'pytest -q'] Result:\n{OUTPUT}", details),
    ]
    side = {"model": "any", "messages": [user(TITLE)], "temperature": 0, "stream": True}
    return _chat("cline", common, first, answer, side)


def aider() -> Agent:
    common: Body = {"model": "openai/any", "temperature": 0, "stream": True, "extra_headers": None, "user": "aider"}
    example = [{"role": "user", "content": "Change x."}, {"role": "assistant", "content": "Ok."}]
    first = [{"role": "system", "content": RULES}, *example, {"role": "user", "content": TASK}]
    answer: list[Body] = [
        {"role": "assistant", "content": "tests/test_parser.py\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE"},
        {"role": "user", "content": f"I ran it:\n{OUTPUT}"},
    ]
    side = {
        "model": "openai/any",
        "messages": [{"role": "system", "content": TITLE}, {"role": "user", "content": TASK}],
        "stream": False,
    }
    return _chat("aider", common, first, answer, side)


def pi() -> Agent:
    common: Body = {
        "model": "any",
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
        "max_completion_tokens": 16384,
        "tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    first = [
        {"role": "developer", "content": RULES},
        {"role": "user", "content": [{"type": "text", "text": TASK}]},
    ]
    answer: list[Body] = [
        {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "Run it."},
        {"role": "tool", "content": OUTPUT, "tool_call_id": "call_1", "name": "bash"},
    ]
    side = {
        "model": "any",
        "messages": [{"role": "user", "content": TITLE}],
        "max_completion_tokens": 64,
        "stream": True,
    }
    return _chat("pi", common, first, answer, side)


AGENTS = [claude_code(), codex(), opencode(), cline(), aider(), pi()]
