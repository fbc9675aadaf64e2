"""Which of llama.cpp's server tests apply here; written before they are run.

A file that is not listed in FILES is about something this server does not have (embeddings, reranking,
infilling, LoRA, multi-model routing, MCP, built-in tools, speculative decoding, sleeping, vision, slot
files, the web interface).  Within a listed file every test applies unless EXCLUDED names it: by its
name, or by name and the beginning of its parameters.
"""

from __future__ import annotations

FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_ignore_eos.py",
    "test_metrics.py",
    "test_security.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)

HUB_NUMBERS = "expects token counts of a tokenizer that comes from a model hub"
HUB_MODEL = "needs a model of a hub whose answers are the point"
NOT_BUILT = "about a feature this server does not have: "
OURS = "decided otherwise here: "
NO_PROJECTOR = OURS + "image input without a projector is the client's error (400, not 500)"

EXCLUDED: dict[str, str] = {
    # test_basic
    "test_server_multiple_addresses": NOT_BUILT + "several addresses in one --host",
    "test_load_split_model": HUB_MODEL,
    "test_no_ui": NOT_BUILT + "the web interface",
    "test_server_model_aliases_and_tags": NOT_BUILT + "several aliases and tags",
    # test_chat_completion
    "test_chat_completion": HUB_NUMBERS,
    "test_chat_completion_cached_tokens": HUB_NUMBERS,
    "test_chat_completion_stream": HUB_NUMBERS,
    "test_return_progress[64-2-True": OURS + "a prompt sent again is not evaluated at all, its logits are kept",
    "test_chat_template": NOT_BUILT + "templates by name, without Jinja",
    "test_apply_chat_template": NOT_BUILT + "templates by name, without Jinja",
    # test_compat_anthropic
    "test_anthropic_tool_result_with_image": NO_PROJECTOR,
    "test_anthropic_vision_format_accepted": NO_PROJECTOR,
    "test_anthropic_vision_base64_with_multimodal_model": HUB_MODEL,
    "test_anthropic_empty_messages": OURS + "a request without a message is refused, as Anthropic does",
    "test_anthropic_thinking_with_reasoning_model": HUB_MODEL,
    # test_compat_oai_responses
    "test_responses_stream_with_llama_telemetry": OURS + "an answer cut by its limit ends with response.incomplete",
    # test_completion
    "test_completion": HUB_NUMBERS,
    "test_completion_stream": HUB_NUMBERS,
    "test_completion_prompt_cache": HUB_NUMBERS,
    "test_completion_response_fields[I believe the meaning of life is-32": "expects the hub tokenizer's text of BOS",
    "test_completion_stream_with_openai_library_stops": HUB_MODEL,
    "test_completion_unified": NOT_BUILT + "one row store shared by all slots",
    "test_n_probs_post_sampling": NOT_BUILT + "probabilities after the sampler chain",
    "test_n_probs_post_backend_sampling": NOT_BUILT + "probabilities after the sampler chain",
    # test_ctx_shift
    "test_ctx_shift_enabled": OURS + "context is never shifted, since shifted rows are rows nobody computed",
    "test_ctx_shift_disabled_short_prompt[-1": HUB_NUMBERS,
    # test_ignore_eos
    "test_ignore_eos_populates_logit_bias": OURS + "settings are shown as asked, not expanded",
    # test_metrics
    "test_metrics_prometheus_format": NOT_BUILT + "metrics of speculative decoding",
    "test_metrics_embedding_prompt_is_counted": NOT_BUILT + "embeddings",
    # test_security
    "test_access_static_assets_without_api_key": NOT_BUILT + "the web interface",
    "test_cors_options": OURS + "no web page may call the server unless asked for",
    "test_cors_origins_localhost_rejects": OURS + "a refused preflight is 400, not 200 without the header",
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": NOT_BUILT + "built-in tools",
    "test_cors_proxy_only_forwards_explicit_proxy_headers": NOT_BUILT + "the CORS proxy",
    "test_local_media_file": NOT_BUILT + "media input",
    # test_tokenize
    "test_tokenize_with_bos": HUB_NUMBERS,
    # test_tool_call
    "test_completion_with_required_tool_real_model": HUB_MODEL,
    "test_completion_without_tool_call_slow": HUB_MODEL,
    "test_weather": HUB_MODEL,
    "test_calc_result": HUB_MODEL,
    "test_thoughts": HUB_MODEL,
    "test_hello_world": HUB_MODEL,
}


def reason_not_to_run(test: str) -> str | None:
    """Why a test is excluded; ``test`` is its name with parameters, as pytest writes it."""
    name = test.partition("[")[0]
    if name in EXCLUDED:
        return EXCLUDED[name]
    return next((reason for key, reason in EXCLUDED.items() if "[" in key and test.startswith(key)), None)
