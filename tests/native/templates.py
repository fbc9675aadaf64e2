"""Chat templates written for the tests, each with one trait of real ones, and requests to render."""

from __future__ import annotations

from dataclasses import replace

from gufo_gguf.backend.chat import ChatInput

PLAIN = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Reasoning of past answers goes once a new user turn comes, and the opening begins a reasoning
# block, which past answers do not show: the assistant opening is never sent again.
FORGETS_REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ (m.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""

# Without the assistant opening it ends with another marker, which begins like the opening.
ENDS_WITH_MARKER = """\
{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- else -%}{{ '<|endoftext|>' }}{%- endif -%}
"""

# Tool calls in tags, one per parameter: a format that llama.cpp recognises by these three.
TAGGED_CALLS = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' }}{%- for t in tools -%}{{ t.function | tojson + '\\n' }}{%- endfor -%}
{{- 'Answer <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\\n' + (value | string) + '\\n</parameter>\\n' }}
{%- endfor -%}
{{- '</function>\\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Every answer after the last question shows where it thought, even if it did not; and text beside a call is shown
# only there.  Both go once a new user turn comes, from the loop's start.
EMPTY_THOUGHTS = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif -%}
{%- if not m.tool_calls or loop.index0 > ns.last -%}{{ m.content or '' }}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}
"""
BESIDE_CALLS = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if not m.tool_calls or loop.index0 > ns.last -%}{{ m.content or '' }}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Channels: llama.cpp knows the format by its marker and hands the reasoning over as ``thinking``.
CHANNELS = """\
{%- for m in messages -%}
{{ '<|start|>' + m.role + '<|channel|>' + (m.thinking or '') + '<|message|>' + (m.content or '') + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

# Refuses a conversation that goes on after an answer, hence every probe.
ONE_TURN = """\
{%- if messages | selectattr('role', 'equalto', 'assistant') | list | length > 0 and messages[-1].content != 'test' -%}
{{- raise_exception('only one turn, please') -}}
{%- endif -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# The date in the system prompt, in the three ways templates have.
DATED = """\
{{ '<|im_start|>system\\n' + strftime_now('%d %B %Y %H:%M') + ' / ' + date_string + ' / ' + datetime }}
{{- '<|im_end|>\\n' }}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}
LIST_DIR = {
    "type": "function",
    "function": {"name": "list_dir", "parameters": {"type": "object", "properties": {"dir": {"type": "string"}}}},
}
ASK = ChatInput(messages=[{"role": "user", "content": "read a.txt"}])
WITH_TOOLS = replace(ASK, tools=[READ_FILE, LIST_DIR])
ANSWER = (
    "<think>\nI should read it.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt", "lines": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "list_dir", "arguments": {"dir": "."}}\n</tool_call>'
)
