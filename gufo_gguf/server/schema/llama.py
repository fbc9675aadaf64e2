"""Bodies of llama-server's small endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from gufo_gguf.server.schema.completions import is_token
from gufo_gguf.server.schema.types import Body, Bool


def _content(value: Any) -> list[str | int]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(x, str) or (is_token(x) and 0 <= x < 1 << 31) for x in items):
        raise ValueError("must be a text, or a list of texts and token ids")
    return items


def _tokens(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(is_token(x) for x in value):
        raise ValueError("must be a list of token ids")
    return value


Content = Annotated[
    list[str | int], PlainValidator(_content), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
]
Tokens = Annotated[list[int], PlainValidator(_tokens), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


class TokenizeBody(Body):
    content: Content = Field(default_factory=list)
    add_special: Bool | None = None
    parse_special: Bool | None = None
    with_pieces: Bool | None = None


class DetokenizeBody(Body):
    tokens: Tokens = Field(default_factory=list)
