"""Decides which routes the ingress passes on: those that any replica can answer, because they
neither store anything for a later request nor concern one engine."""

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
"""Routes whose bodies hold prompts; they go to the replica that has the prompt in its cache."""
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
    """Why the ingress refuses requests for this path; None if it passes them on."""
    if path in PROMPTS or path in OTHERS or path.startswith("/v1/models/"):
        return None
    return (
        f"{path} is not available behind Ray Serve: it concerns a single server or what that"
        " server stores, and here there may be several. Use a server that `setpoint serve` runs."
    )
