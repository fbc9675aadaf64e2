"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from gufo_gguf.server.schema.sampling import SamplingFields
from gufo_gguf.server.schema.types import Body, Bool, Int, NonNegative, Positive, Str

Prompt = str | list[int | str]
"""One prompt: text, token ids, or a mixture of both in order."""


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_prompts(value: Any) -> list[Prompt]:
    """One prompt or several, in every form the two APIs know:

    "text" · [1, 2, 3] · [1, 2, "text", 3] · ["a", "b"] · [[1, 2], "text", [3, "b"]]

    A flat list is one prompt as soon as it holds a token id; of texts alone it is several prompts.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise ValueError("image and audio input is not supported: no projector is loaded")
        return [value["prompt_string"]]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a non-empty list of token ids, or a list of prompts")
    if is_token(value[0]) or any(is_token(x) for x in value):
        return [_mixed(value)]
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, list):
            prompts.append(_mixed(item))
        elif isinstance(item, (str, dict)):
            prompts.extend(parse_prompts(item))
        else:
            raise ValueError("each prompt must be a text or a list of token ids")
    return prompts


def _mixed(value: list[Any]) -> list[int | str]:
    if not value:
        raise ValueError("a list of token ids is empty")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 1 << 31:
        return value  # the usual case, and it may be 100,000 ids
    if not all(is_token(x) or isinstance(x, str) for x in value):
        raise ValueError("a list of token ids may hold token ids and texts only")
    if any(is_token(x) and not 0 <= x < 1 << 31 for x in value):
        raise ValueError("a token id is out of range")
    return value


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class StreamOptions(Body):
    include_usage: Bool | None = None
    include_obfuscation: Bool | None = None
    continuous_usage_stats: Bool | None = None


class CompletionBody(SamplingFields):
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "suffix": ("",),
        "lora": ([],),
        "n_indent": (0,),
        "t_max_predict_ms": (0, -1),
    }

    prompt: Prompts
    n: Positive | None = None
    n_cmpl: Positive | None = None
    best_of: Positive | None = None
    echo: Bool | None = None
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    n_probs: NonNegative | None = None
    post_sampling_probs: Bool | None = None
    """The chances that the sampler's chain left, instead of the model's log-probabilities."""
    stream_options: StreamOptions | None = None
    json_schema: dict[str, Any] | None = None
    verbose: Bool | None = None
    return_tokens: Bool | None = None
    response_fields: list[Str] | None = None
