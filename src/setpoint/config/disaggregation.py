"""What --disaggregation-mode demands and changes (decision 0072). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from setpoint.config.decisions import Book
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

if TYPE_CHECKING:
    from setpoint.core.model import ModelSpec

OFFLOAD = "disaggregation-decode-enable-offload-kvcache"
NO_STORAGE = f"The argument {OFFLOAD} is only supported when hicache-storage-backend is provided."
OWN = "setpoint"


def check_disaggregation(options: Options) -> None:
    """Raise ConfigError if --disaggregation-mode or what belongs to it contradicts other
    options."""
    own, parallel, mode = options.disaggregation, options.parallel, _mode(options)
    if own.disaggregation_decode_enable_offload_kvcache:
        if mode != "decode":
            raise ConfigError(f"The argument {OFFLOAD} is only supported for decode side.")
        if options.tiers.hicache_storage_backend is None:
            raise ConfigError(NO_STORAGE)
    _check_prefill_servers(own.disaggregation_prefill_servers, mode)
    if mode == "null":
        return
    for is_given, flag, why in _conflicts(options):
        if is_given:
            raise ConfigError(
                f"--disaggregation-mode {mode} cannot be combined with {flag}, because {why}; leave"
                " one of them out."
            )
    method = parallel.load_balance_method
    if mode == "prefill" and method not in ("auto", "follow_bootstrap_room"):
        raise ConfigError(
            f"--load-balance-method {method} cannot be combined with --disaggregation-mode prefill:"
            " a decode server finds a room's engine by its number. Use follow_bootstrap_room."
        )


def _check_prefill_servers(urls: tuple[str, ...], mode: str) -> None:
    flag = "--disaggregation-prefill-servers"
    if urls and mode != "decode":
        instead = "give" if mode == "null" else "this is a prefill server; give"
        raise ConfigError(
            f"{flag} is for decode servers: {instead} --disaggregation-mode decode, or leave"
            f" {flag} out."
        )
    for url in urls:
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme == "http" and parts.hostname and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or parts.path.rstrip("/") or parts.query:
            raise ConfigError(f"{flag} must be http://HOST:PORT, got {url!r}.")


def _conflicts(options: Options) -> tuple[tuple[bool, str, str], ...]:
    """(is it given, its flag, why it cannot be combined with a mode) of other options."""
    parallel = options.parallel
    return (
        (
            options.memory.disable_radix_cache,
            "--disable-radix-cache",
            "keys and values that arrive become a part of the prefix cache",
        ),
        (
            parallel.nnodes > 1,
            f"--nnodes {parallel.nnodes}",
            "ranks of other machines have no bootstrap server to register at",
        ),
        (
            parallel.engine_standby,
            "--engine-standby",
            "a standby would answer for the engine that serves",
        ),
        (
            options.recording.record is not None and options.recording.record_content == "off",
            "--record and --record-content off",
            "the first tokens of other servers are content, for which there is no substitute yet",
        ),
        (options.model.is_embedding, "--is-embedding", "embeddings have no second part"),
        (
            options.answers.enable_return_hidden_states,
            "--enable-return-hidden-states",
            "hidden states are not handed over",
        ),
    )


def check_handed_model(options: Options, model: ModelSpec) -> None:
    """Raise ConfigError if this model's cache cannot be handed over."""
    if _mode(options) != "null" and model.pooling is not None:
        raise ConfigError(
            f"--disaggregation-mode {_mode(options)} is for models that generate text, and"
            f" {model.architecture} embeds; leave it out."
        )


def settle_disaggregation(book: Book) -> None:
    """Settle what follows from the mode."""
    mode = _mode(book.options)
    if mode == "null":
        return
    backend = book.options.disaggregation.disaggregation_transfer_backend
    if backend != OWN:
        book.put(
            "disaggregation_transfer_backend",
            OWN,
            f"{backend} is SGLang's name; Setpoint moves keys and values itself, through shared"
            " memory or TCP, and only between servers of its own",
            warn=True,
        )
    if mode == "prefill" and book.get("load_balance_method") == "auto":
        book.put(
            "load_balance_method",
            "follow_bootstrap_room",
            "a decode server finds a room's engine by its number",
        )
    if mode == "decode" and book.options.tiers.enable_hierarchical_cache:
        _settle_decode_tiers(book)
    if mode == "decode" and not book.get("enable_mixed_chunk"):
        book.put(
            "enable_mixed_chunk",
            True,
            "a request that arrives joins the others in their next step, because it has a token or"
            " a page to compute",
        )


def _settle_decode_tiers(book: Book) -> None:
    """Say what a decode server does with cache tiers."""
    if not book.get("disaggregation_decode_enable_offload_kvcache"):
        book.put(
            "enable_hierarchical_cache",
            True,
            f"given; without --{OFFLOAD} a decode server saves nothing, and loads only prompts that"
            " it has to compute itself",
            is_news=True,
        )
    elif book.changed("hicache_write_policy"):
        book.put(
            "hicache_write_policy",
            book.get("hicache_write_policy"),
            "given, without effect: a decode server saves outputs when their request ends",
            warn=True,
        )


def _mode(options: Options) -> str:
    return options.disaggregation.disaggregation_mode
