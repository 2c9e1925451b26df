"""Which routes the ingress passes on. Any replica can answer them: they neither keep anything for a
later request nor concern one engine."""

from __future__ import annotations

PROMPTS = frozenset(
    {
        "/api/chat",
        "/api/embed",
        "/api/embeddings",
        "/api/generate",
        "/encode",
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/score",
    }
)
"""Those whose bodies hold prompts: they go where these are cached."""
OTHERS = frozenset(
    {
        "/api/show",
        "/api/tags",
        "/api/version",
        "/detokenize",
        "/get_model_info",
        "/health",
        "/health_generate",
        "/model_info",
        "/parse_function_call",
        "/ready",
        "/separate_reasoning",
        "/tokenize",
        "/tokenizer_info",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/tokenize",
    }
)


def refusal(path: str) -> str | None:
    """Why the ingress does not pass a request on; None if it does."""
    if path in PROMPTS or path in OTHERS or path.startswith("/v1/models/"):
        return None
    return (
        f"{path} is not served behind Ray Serve: it concerns one server or what one server keeps,"
        " and there are several. Ask a server of `setpoint serve`."
    )
