"""One request's sampler, bound to the context that it draws from."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from gufo_gguf.backend import native
from gufo_gguf.backend.base import Logits
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.sampling import Sampler, top_logprobs
from gufo_gguf.backend.vocab import Vocab
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import GenerateRequest, TokenLogprob, as_tokens

log = logging.getLogger("gufo.engine")


class RequestSampler:
    """See ``job.TokenSampler``."""

    def __init__(self, backend: LlamaBackend, vocab: Vocab, request: GenerateRequest) -> None:
        self._backend = backend
        self._vocab = vocab
        self._lib = native.library()
        self._request = request
        self._sampler = Sampler(self._lib, backend.model_ptr, request.sampling)
        self._sampler.accept_prompt(request.tokens)
        self.preserved = self._sampler.preserved_tokens
        self._after = request.post_sampling
        self._generated: list[int] = []
        self._refusal: RequestError | None = None

    def sample(self, slot: int) -> int:
        if self._refusal is not None:
            raise self._refusal
        return self._sampler.sample(self._backend.ctx_ptr, self._backend.output_index(slot))

    def sample_logits(self, logits: Logits) -> int:
        return self._sampler.sample_logits(logits)

    def accept(self, token: int) -> None:
        """Never raises: the token is drawn already.

        A lazy grammar sees the text that woke it only afterwards, and that text may not fit it (a tool
        call's opening in the same token as something else).  The answer then goes on without the
        grammar: as text, which is what the parser makes of a broken call.
        """
        self._generated.append(token)
        try:
            self._sampler.accept(token)
        except RequestError as error:
            if not self._request.sampling.grammar_lazy:
                self._refusal = error
                return
            log.info("a tool call's opening does not fit its grammar; the answer goes on as text")
            self._drop_grammar()

    def _drop_grammar(self) -> None:
        plain = replace(
            self._request.sampling, grammar="", grammar_lazy=False, grammar_triggers=[], seed=self._sampler.seed
        )
        self._sampler.close()
        self._sampler = Sampler(self._lib, self._backend.model_ptr, plain)
        self._sampler.accept_prompt(as_tokens([*self._request.tokens, *self._generated]))

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
