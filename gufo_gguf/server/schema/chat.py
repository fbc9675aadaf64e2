"""The body of /v1/chat/completions: fields alone; messages and tools are checked in ``chat/``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from gufo_gguf.server.schema.completions import StreamOptions
from gufo_gguf.server.schema.sampling import SamplingFields
from gufo_gguf.server.schema.types import Bool, Int, JsonObject, NonNegative, Positive, Str

Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
                },
            },
        }
    ),
]
Tools = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})]
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]


class ChatBody(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "functions": ([],),
        "function_call": ("auto", "none"),
        "audio": (),
        "lora": ([],),
        "t_max_predict_ms": (0, -1),
        "chat_template": ("",),
        "guided_json": ({},),
        "guided_regex": ("",),
        "guided_choice": ([],),
    }

    messages: Messages
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Bool | None = None
    response_format: JsonObject | None = None
    json_schema: JsonObject | None = None
    logprobs: Bool | None = None
    top_logprobs: NonNegative | None = None
    post_sampling_probs: Bool | None = None
    """The chances that the sampler's chain left, instead of the model's log-probabilities."""
    n: Positive | None = None
    n_cmpl: Positive | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Str | None = None
    reasoning_format: Str | None = None
    reasoning: JsonObject | None = None
    """Another service's form: {"effort", "enabled", "max_tokens"}."""
    thinking: JsonObject | None = None
    """Another service's form: {"type": "enabled" | "disabled", "budget_tokens"}."""
    enable_thinking: Bool | None = None
    thinking_budget_tokens: Annotated[Int, Field(ge=-1)] | None = None
    reasoning_budget_tokens: Annotated[Int, Field(ge=-1)] | None = None
    reasoning_budget_message: Str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | Str | None = None
    verbose: Bool | None = None
