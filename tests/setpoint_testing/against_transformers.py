"""Measures a model folder against transformers: logits and greedy ids through scheduler, cache and
runner, parameters, chat template.

transformers judges our outputs: one forward pass of it over prompt and outputs gives what it would
have said at every position.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
import numpy as np
import torch
from safetensors.numpy import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from setpoint.checkpoint.spec import read_spec
from setpoint.core.cachegroups import cache_layout
from setpoint.core.errors import RequestError
from setpoint.core.plan import StepPlan
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor, InprocStep
from setpoint.frontend.text.template import ChatTemplate
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.chat_templates import CHATS
from setpoint_testing.harness import Harness
from setpoint_testing.neartie import NEAR_TIE
from setpoint_testing.tiny_models import draw

PAGE, CHUNK = 4, 24
"""Prompts are cut within pages and across them."""
TOLERANCES = {"float32": 6e-5, "float64": 1e-9}
"""Dtype -> upper limit of the largest difference of a logit, divided by the spread of the
logits. The rounding of float32 differs between processors: 4.2e-5 is the most that was seen, where
float64 differs by 3e-14."""
SPECIALS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
REFUSED = "(refused)"
TIED_SCALE = np.float32(0.2)
"""Factor for embeddings that are also the output head: without it a model would repeat its last
token again and again."""


def write_tiny(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a random model of any architecture that transformers knows, with the tensors that it
    would save; returns the folder. A process computes the tensors of one model once."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(json.dumps(config, indent=1), seed).items():
        (folder / name).write_bytes(content)
    return folder


@cache
def _files(config: str, seed: int) -> dict[str, bytes]:
    """Name -> content of the files of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        _compute_tiny(Path(folder), config, seed)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _compute_tiny(folder: Path, config: str, seed: int) -> None:
    (folder / "config.json").write_text(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    rng = np.random.default_rng(seed)
    tensors = {
        name: draw(rng, name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    }
    if any(tensor.ndim == 3 for tensor in tensors.values()):
        # transformers stacks experts; what it saves has them one by one, as checkpoints do.
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        whole.load_state_dict({name: torch.from_numpy(each) for name, each in tensors.items()})
        whole.save_pretrained(folder)
        (folder / "config.json").write_text(config)
        return
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
        embedding = model.get_input_embeddings().weight
        tensors[
            next(name for name, parameter in model.named_parameters() if parameter is embedding)
        ] *= TIED_SCALE
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@dataclass(slots=True)
class Recording:
    """An executor that keeps the logits of every sampled token."""

    inner: InprocExecutor
    logits: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Sequence id -> the logits [V] of each output token."""
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> InprocStep:
        step = self.inner.submit(plan)
        for admit in plan.admits:
            self.prompts[admit.seq_id] = admit.ids[: admit.num_prompt].tolist()
        if step.forward.logits is not None:
            # Sampling may work in place.
            for seq_id, row in zip(
                plan.rows.seq_ids[plan.rows.sampling].tolist(),
                step.forward.logits.clone().cpu(),
                strict=True,
            ):
                self.logits[seq_id].append(row)
        return step

    def idle(self) -> bool:
        return self.inner.idle()

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass(slots=True)
class Agreement:
    """How closely our outputs agree with transformers', over every position that sampled."""

    max_error: float = 0.0
    """Largest difference of a logit."""
    spread: float = 0.0
    """Standard deviation of transformers' logits."""
    num_prompts: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    """Prompt tokens that came from the cache."""
    near_ties: int = 0
    """Tokens that are not transformers' choice, but less than NEAR_TIE of a logit below it."""
    wrong: int = 0
    """Tokens that are further below transformers' choice."""
    implementation: str = ""
    """Whose model code ran on our side."""
    parameters: tuple[int, int, int] = (0, 0, 0)
    """Numbers of parameters: counted in the files, planned without files, and by transformers."""

    @property
    def relative(self) -> float:
        return self.max_error / self.spread

    def add(self, ours: torch.Tensor, theirs: torch.Tensor, ids: Sequence[int]) -> None:
        """Compare one sequence. ours, theirs: logits [n, V]; ids: the n tokens that we chose."""
        self.max_error = max(self.max_error, float((ours - theirs).abs().max()))
        self.spread = max(self.spread, float(theirs.std()))
        behind = theirs.max(-1).values - theirs[torch.arange(len(ids)), list(ids)]
        self.near_ties += int(((behind > 0) & (behind < NEAR_TIE)).sum())
        self.wrong += int((behind >= NEAR_TIE).sum())
        self.num_prompts += 1
        self.num_tokens += len(ids)


class _WideArithmetic(TorchFunctionMode):
    """What asks for fp32 gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {
            key: torch.float64 if each is torch.float32 else each
            for key, each in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def _wide(model: torch.nn.Module) -> Iterator[None]:
    """transformers' norms, softmaxes and routers compute in float64, where they would round to
    fp32. The angles of rotary positions stay fp32, as they are in Setpoint."""

    def exact(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def narrow(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return forward(*args, **kwargs)

        return narrow

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = exact(module.forward)
    # DeepSeek-V2's rotary positions: ``polar`` rounds its cosines differently from ``cos``.
    with _WideArithmetic(), patch.object(torch, "polar", _polar):
        yield


def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.complex(size * angle.cos(), size * angle.sin())


def measure(
    folder: Path,
    *,
    context_len: int,
    prompt_lengths: Sequence[int],
    num_new: int,
    attention: str = "auto",
    num_threads: int = 1,
    model_impl: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    judged_by: Path | None = None,
) -> Agreement:
    """Compare random prompts in fp32 or float64. They run together, in chunks, and twice: the
    second time from the cache. judged_by: the folder that transformers reads; None: ``folder``."""
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE,
        attention_backend=attention,
        num_threads=num_threads,
        model_impl=model_impl,
        device=device,
    )
    runner = build_runner(config)
    num_pages = 2 * sum(-(-(length + num_new) // PAGE) for length in prompt_lengths)
    num_pages *= len(cache_layout(runner.spec, context_len).groups)
    runner.allocate(num_pages=num_pages, max_slots=len(prompt_lengths), context_len=context_len)
    recording = Recording(InprocExecutor(runner))
    harness = Harness(
        num_pages=num_pages,
        page_size=PAGE,
        row=runner.pool.layout.page_row,
        executor=recording,
        vocab_size=runner.spec.vocab_size,
        chunked_prefill_size=CHUNK,
        max_running_requests=len(prompt_lengths),
    )
    rng = np.random.default_rng(7)
    vocab_size = runner.spec.vocab_size
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in prompt_lengths]
    reference = _reference(judged_by or folder, dtype)
    agreement = Agreement(parameters=_parameters(folder, reference))
    agreement.implementation = runner.report.model_impl
    for turn in ("cold", "warm"):
        for index, prompt in enumerate(prompts):
            harness.submit(f"{turn} {index}", prompt, max_new_tokens=num_new, temperature=0.0)
        harness.drain()
    agreement.num_cached = sum(outcome.num_cached for outcome in harness.outcomes.values())
    wide = _wide(reference) if dtype == "float64" else nullcontext()
    with torch.inference_mode(), wide:
        for seq_id, rows in recording.logits.items():
            prompt, ids = recording.prompts[seq_id], [int(row.argmax()) for row in rows]
            theirs = reference(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            agreement.add(torch.stack(rows), theirs, ids)
    found = [tuple(int(row.argmax()) for row in rows) for rows in recording.logits.values()]
    assert sorted(found) == sorted(tuple(outcome.ids) for outcome in harness.outcomes.values())
    return agreement


def _reference(folder: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def _parameters(folder: Path, reference: Any) -> tuple[int, int, int]:
    stored = reference.state_dict()
    saved = sum(
        buffer.numel() for name, buffer in reference.named_buffers() if name in stored
    )  # of which the correction of a router's scores is one
    with tempfile.TemporaryDirectory() as bare:
        shutil.copy(folder / "config.json", bare)
        return (
            read_spec(folder).num_parameters,
            read_spec(Path(bare)).num_parameters,
            reference.num_parameters() + saved,
        )


def template_differences(template: str, *, tokenizer: Any = None) -> list[str]:
    """The conversations that we render differently from transformers, each as "ours is not
    theirs".

    ``tokenizer`` is transformers' own for the model; without one the special tokens are the byte
    tokenizer's.
    """
    tokenizer = tokenizer or PreTrainedTokenizerFast(
        tokenizer_object=make_byte_tokenizer(), **SPECIALS
    )
    specials = {name: token for name in SPECIALS if (token := getattr(tokenizer, name)) is not None}
    ours, found = ChatTemplate(template, special_tokens=specials), []
    for messages, variables in CHATS:
        for prompt in (True, False):
            try:
                text = ours.render(messages, add_generation_prompt=prompt, variables=variables)
            except RequestError:
                text = REFUSED
            try:
                theirs = tokenizer.apply_chat_template(
                    messages,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **variables,
                )
            except jinja2.TemplateError:
                theirs = REFUSED
            if text != theirs:
                found.append(f"{text!r} is not {theirs!r}")
    return found
