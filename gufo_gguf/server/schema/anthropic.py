"""The body of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from gufo_gguf.server.schema.chat import Messages, ToolChoice, Tools
from gufo_gguf.server.schema.sampling import SamplingFields, Stop
from gufo_gguf.server.schema.types import JsonObject

_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}


class AnthropicBody(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {}

    messages: Messages
    system: Annotated[Any, WithJsonSchema(_TEXT_OR_BLOCKS)] = None
    stop_sequences: Stop = ()
    tools: Tools = None
    tool_choice: ToolChoice = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    thread: JsonObject | None = None
    """State held by the server between requests, which there is none of here."""
