"""Every exception a caller may see, in one tree.

    GufoError
    ├── ConfigError            a flag, file or field is wrong; the message names it and the remedy
    ├── ModelError             the file is not a model we can load
    │   └── UnsupportedMemory  the model's memory kind is not one whose state we can prove
    ├── BackendError           the native layer refused or failed
    │   ├── ContextFull        the sequence does not fit its slot any more
    │   ├── SlotNotReady       a slot between begin and finish of a restore was used
    │   └── StateRejected      a payload failed its checks; the slot was cleared
    ├── RequestError           the request cannot be served as asked (HTTP 400)
    │   └── ContextLengthExceeded
    ├── Overloaded             the queue is full (HTTP 503)
    └── StoreError             the disk tier cannot be used; serving goes on without it

Expected refusals (a capture that does not fit, a lookup that finds nothing) are return values
with a reason, never exceptions.  A broken invariant is neither: it latches the cache off.
"""

from __future__ import annotations


class GufoError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(GufoError):
    """A setting is wrong; the message names the setting and the remedy."""


class ModelError(GufoError):
    """The model file cannot be loaded; the message names the file and the reason."""


class UnsupportedMemory(ModelError):
    """State of this memory kind cannot be saved exactly; the model is served uncached."""


class BackendError(GufoError):
    """The native layer refused a call or failed in it."""


class ContextFull(BackendError):
    """The sequence does not fit its slot any more; what was computed stays usable."""


class SlotNotReady(BackendError):
    """A slot between begin and finish of a restore was asked to run or to give state."""


class StateRejected(BackendError):
    """A payload failed its checks (size, position, NaN); the slot is empty afterwards."""


class RequestError(GufoError):
    """The request cannot be served as asked.

    ``param`` names the offending field, ``code`` is the machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestError):
    """The prompt is longer than the slot's context; both numbers are in the message."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt} tokens, but the context of one sequence has {n_ctx}; "
            f"shorten the prompt or load the model with a larger ctx_size (--ctx-size)",
            code="context_length_exceeded",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class Overloaded(GufoError):
    """The waiting queue is full; ``retry_after_s`` is a hint for the client."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreError(GufoError):
    """The disk tier cannot be used; the message names the folder and the reason."""
