"""Field types that say no clearly, and the base of every request body.

pydantic's lax mode was rejected ("0.7" as a number, true as 1: a client's bug that then shows
somewhere else), and so was its strict mode as it is (100.0 as a token count is what some JSON
writers make of 100).  null means absent everywhere: many clients send every field they know.
"""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gufo_gguf.server.schema.ignored import is_ignored


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
NonNegative = Annotated[int, BeforeValidator(_integral), Field(strict=True, ge=0)]
Positive = Annotated[int, BeforeValidator(_integral), Field(strict=True, ge=1)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Str = Annotated[str, Field(strict=True)]
JsonObject = dict[str, Any]


MAX_DEPTH = 100
"""Of lists and objects within a field.  Schemas and tools go through recursive native code, whose stack is
the process's; what a request needs is less than a tenth of this."""


def unfit(value: list[Any] | dict[str, Any]) -> str | None:
    """Why a field's value cannot be handed on, if so: nested too deeply, or with a number that JSON has not."""
    level: list[list[Any] | dict[str, Any]] = [value]
    for _ in range(MAX_DEPTH):
        below: list[list[Any] | dict[str, Any]] = []
        for container in level:
            for item in container.values() if isinstance(container, dict) else container:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is float and not math.isfinite(item):
                    return "holds a number that JSON has not (NaN, Infinity, or beyond a double)"
        if not below:
            return None
        level = below
    return f"is nested more than {MAX_DEPTH} levels deep"


class Body(BaseModel):
    """A request body: unknown fields are refused by name, except those known to change nothing here."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True, protected_namespaces=())

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields understood but not built, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unfit(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, value in body.items():
                # infinite biases have a meaning of their own
                reason = unfit(value) if isinstance(value, (dict, list)) and name != "logit_bias" else None
                if reason is not None:
                    raise PydanticCustomError("invalid_value", "{name}: " + reason, {"name": name})
        return body

    @model_validator(mode="after")
    def _refuse_unknown(self, info: ValidationInfo) -> Body:
        for name, value in (self.model_extra or {}).items():
            harmless = self.unsupported.get(name)
            if harmless is not None:
                if value is not None and value not in harmless:
                    raise PydanticCustomError(
                        "unsupported_field", "{name}: is not supported by this server", {"name": name}
                    )
            elif not is_ignored(name):
                near = difflib.get_close_matches(name, list(type(self).model_fields), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise PydanticCustomError("unknown_field", "{name}: there is no such field" + hint, {"name": name})
        return self

    def given(self, name: str) -> bool:
        """Was the field sent, and not as null?"""
        return name in self.model_fields_set and getattr(self, name) is not None
