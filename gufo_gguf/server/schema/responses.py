"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from gufo_gguf.server.schema.chat import ToolChoice, Tools
from gufo_gguf.server.schema.sampling import SamplingFields, TokenLimit
from gufo_gguf.server.schema.types import Bool, JsonObject, NonNegative, Str

_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class ResponsesBody(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "conversation": (),
        "previous_response_id": ("",),
        "prompt": (),
        "max_tool_calls": (),
    }

    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: Str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Bool | None = None
    text: JsonObject | None = None
    reasoning: JsonObject | None = None
    top_logprobs: Annotated[NonNegative, Field(le=20)] | None = None
    stream_options: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    previous_response_id: Str | None = None
    metadata: JsonObject | None = None
