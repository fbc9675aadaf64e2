"""Fields that real clients send, that change nothing here, and that must not fail a request.

The one list.  A field belongs here when ignoring it gives the client what it asked for on a server
with one local model: bookkeeping, billing, routing, hints to caches that work differently.  A field
whose effect a client would miss does not belong here: it is refused by name instead.
"""

from __future__ import annotations

BOOKKEEPING = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "model",
        "request_id",
        "rid",
        "trace",
        "tags",
        "session_id",
        "conversation_id",
        "extra_headers",
        "client_metadata",
        "inference_geo",
        "billing_policy",
        "diagnostics",
        "fallback_credit_token",
        "container",
    }
)
"""Who asks, what for, under which plan."""

ROUTING = frozenset(
    {
        "provider",
        "route",
        "models",
        "transforms",
        "plugins",
        "usage",
        "fallbacks",
        "keep_alive",
        "betas",
        "anthropic_version",
        "anthropic_beta",
        "speed",
        "priority",
        "vllm_xargs",
        "custom_params",
    }
)
"""Choices between hosted models; here there is one."""

CACHE_HINTS = frozenset(
    {
        *("cache_control", "context_management", "id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard"),
        *("cache_salt", "kv_transfer_params", "data_parallel_rank"),
    }
)
"""How other servers are told to cache; here it is found by comparing tokens."""

OUTPUT_HINTS = frozenset(
    {
        "modalities",
        "prediction",
        "verbosity",
        "web_search_options",
        "backend_sampling",
        "include",
        "truncation",
        "mcp_servers",
        "reasoning_split",
        "include_reasoning",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "sse_ping_interval",
        "num_ctx",
        "n_ctx",
        "penalize_nl",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "guided_decoding_backend",
        "stream_interval",
        "drop_params",
        "min_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "separate_reasoning",
        "stream_reasoning",
    }
)
"""Wishes about form that a server may leave unmet."""

IGNORED = BOOKKEEPING | ROUTING | CACHE_HINTS | OUTPUT_HINTS


def is_ignored(name: str) -> bool:
    """``x_`` and ``__`` prefixes are clients' own fields; ``speculative.*`` tunes what is not built in."""
    return name in IGNORED or name.startswith(("x_", "x-", "__", "speculative."))
