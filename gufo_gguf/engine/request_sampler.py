"""One request's sampler, bound to the context that it draws from."""

from __future__ import annotations

import math

from gufo_gguf.backend import native
from gufo_gguf.backend.base import Logits
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.sampling import Sampler, top_logprobs
from gufo_gguf.backend.vocab import Vocab
from gufo_gguf.engine.types import GenerateRequest, TokenLogprob


class RequestSampler:
    """See ``job.TokenSampler``."""

    def __init__(self, backend: LlamaBackend, vocab: Vocab, request: GenerateRequest) -> None:
        self._backend = backend
        self._vocab = vocab
        self._lib = native.library()
        self._sampler = Sampler(self._lib, backend.model_ptr, request.sampling)
        self._sampler.accept_prompt(request.tokens)
        self.preserved = self._sampler.preserved_tokens
        self._after = request.post_sampling

    def sample(self, slot: int) -> int:
        return self._sampler.sample(self._backend.ctx_ptr, self._backend.output_index(slot))

    def sample_logits(self, logits: Logits) -> int:
        return self._sampler.sample_logits(logits)

    def accept(self, token: int) -> None:
        self._sampler.accept(token)

    def logprobs(self, logits: Logits, token: int, n_top: int) -> TokenLogprob:
        if self._after:
            return self._drawn(logits.size, token, n_top)
        own, top = top_logprobs(self._lib, logits, token, n_top)
        piece = self._vocab.piece
        return TokenLogprob(token, own, piece(token), tuple((t, p, piece(t)) for t, p in top))

    def _drawn(self, n_vocab: int, token: int, n_top: int) -> TokenLogprob:
        """The chances that the sampler's chain left, instead of the model's own."""
        left = self._sampler.candidates(n_vocab)
        own = next((p for t, p in left if t == token), 0.0)
        piece = self._vocab.piece
        return TokenLogprob(token, _log(own), piece(token), tuple((t, _log(p), piece(t)) for t, p in left[:n_top]))


def _log(chance: float) -> float:
    return math.log(chance) if chance > 0 else -math.inf
