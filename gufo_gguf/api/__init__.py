"""The Python API: a model, its answers, and conversations that can be kept, forked and resumed.

    from gufo_gguf import Engine

    with Engine("model.gguf", ctx_size=8192) as engine:
        print(engine.chat("Name a bird.").text)

Names and defaults are the command line's.  Every failure is one of ``gufo_gguf.core.errors``.
"""

from gufo_gguf.api.answer import Answer, AnswerStream, Usage
from gufo_gguf.api.conversation import Checkpoint, Conversation
from gufo_gguf.api.facade import Engine
from gufo_gguf.api.options import ChatOptions, Options

__all__ = ["Answer", "AnswerStream", "ChatOptions", "Checkpoint", "Conversation", "Engine", "Options", "Usage"]
