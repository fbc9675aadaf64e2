"""Bytes on the wire: JSON by msgspec (a chunk per token must not cost more than the token's sampling).

NaN and infinity become null, since JSON has neither and a log-probability may be -inf.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class JsonResponse(Response):
    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return encode(content)


def data_frame(value: Any) -> bytes:
    """One server-sent event without a name, as OpenAI's APIs send them."""
    return b"data: " + encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """One server-sent event with a name, as Anthropic's API and /v1/cache/events send them."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


DONE_FRAME = b"data: [DONE]\n\n"
