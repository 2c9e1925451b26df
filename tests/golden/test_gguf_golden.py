"""The GGUF conversion against transformers: the default model's weights, tokenizer, template and
words, and Llama 3's rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from setpoint.checkpoint import source
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.read_folder import read_description
from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.layers.rotary import RotaryEmbedding
from setpoint_testing import tiny_gguf
from setpoint_testing.conversion import converted_under
from setpoint_testing.plans import Driver
from setpoint_testing.whole_checkpoint import write_whole

TEXTS = [
    "The capital of France is",
    "Hello, world! It's 2026; we've 1234567890 tokens, don't we?",
    "   leading, trailing   \t tabs\n\n\nand   newlines \r\n ",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # ²√π\n",
    "Ünïcödé, façade, naïve, Straße, ñandú",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Привет мир; مرحبا بالعالم; שלום; नमस्ते दुनिया; สวัสดี",
    "👩‍👩‍👧‍👦🎉🏳️‍🌈 e\u0301 \u200b\ufeff",
    "١٢٣ ½ Ⅷ 三 x1y22z333",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><not_special><|im_end",
    "\x00\x01\x7f\x80\u2028\u3000",
    "a" * 500 + " " * 100 + "!" * 100,
    "",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  2+2? "},
        {"role": "assistant", "content": "4"},
    ],
]


@pytest.fixture(scope="module")
def package() -> Path:
    path = source._package_file()
    assert path is not None, f"the default model is not installed: {source.PACKAGE_ADVICE}"
    return path


@pytest.fixture(scope="module")
def folder(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_under(tmp_path_factory.mktemp("cache"), package)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(folder, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def hf_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.full
def test_every_weight_is_what_transformers_reads_from_the_gguf(whole: Path, package: Path) -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole))
    theirs = load_gguf_checkpoint(str(package), return_tensors=True, model_to_load=empty)
    ours = load_file(whole / "model.safetensors")
    assert ours.keys() == theirs["tensors"].keys()
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(ours[name], tensor.to(torch.bfloat16)), name
    config = json.loads((whole / "config.json").read_text())
    shared = config.keys() & theirs["config"].keys() - {"architectures"}
    assert len(shared) >= 10
    for key in shared:
        assert config[key] == pytest.approx(theirs["config"][key]), key


def test_the_converted_model_knows_the_capital_of_france(
    folder: Path, whole: Path, hf_tokenizer: Any
) -> None:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    inputs = hf_tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert hf_tokenizer.decode(output[0]) == "The capital of France is Paris."
    spec = read_spec(folder)
    assert spec.num_parameters == model.num_parameters() == 134_515_008
    assert (
        sum(tensor.num_bytes for tensor in read_description(folder).tensors)
        == 2 * spec.num_parameters
    )
    assert spec.eos_token_ids == tuple(model.generation_config.eos_token_id)


def test_the_default_model_answers_bit_for_bit_from_its_blocks(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 49_000, 70).tolist()
    logits = []
    for quantization in (None, "unquant"):
        runner = build_runner(
            EngineConfig(
                str(folder),
                read_spec(folder),
                num_threads=2,
                page_size=16,
                quantization=quantization,
            )
        )
        runner.allocate(num_pages=20, max_slots=4, context_len=128)
        driver, steps = Driver(InprocExecutor(runner), 16, 5), []
        for slot, count in enumerate((70, 1, 5)):  # many rows, one, a few
            plan = driver.plan()
            driver.admit(plan, slot, ids[:count])
            plan.add_row(slot, slot, 0, count, 1)
            steps.append(runner.forward(plan.build()).logits.clone())
        logits.append(torch.cat(steps))
        assert ("120 Q4_1 and 1 Q8_0" in runner.report.weights) is (quantization is None)
    assert torch.equal(logits[0], logits[1])


def test_the_tokenizer_gives_the_ids_transformers_gives(folder: Path, hf_tokenizer: Any) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == hf_tokenizer(text).input_ids, text
        assert ours.decode(ids, skip_special_tokens=False) == hf_tokenizer.decode(ids) == text


@pytest.mark.full
def test_the_tokenizer_is_the_one_transformers_makes_of_the_gguf(
    folder: Path, package: Path
) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(package.parent, gguf_file=package.name)
    for text in TEXTS:
        if not any(
            character.isnumeric() for character in text
        ):  # transformers' GGUF path leaves out the split into digits
            assert ours.encode(text).ids == theirs(text).input_ids, text


def test_the_tokenizer_is_the_files_vocabulary(folder: Path, package: Path) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with GGUFFile(package) as file:
        texts, kinds = (
            file.require("tokenizer.ggml.tokens", list),
            file.require("tokenizer.ggml.token_type", list),
        )
        merges = file.require("tokenizer.ggml.merges", list)
    assert [ours.id_to_token(index) for index in range(ours.get_vocab_size())] == texts
    assert {index for index, token in ours.get_added_tokens_decoder().items() if token.special} == {
        index for index, kind in enumerate(kinds) if kind == 3
    }
    alone = [
        text for text in texts[:2000] if text in {merge.replace(" ", "") for merge in merges[:1500]}
    ]
    assert len(alone) > 1000
    pieces = Tokenizer.from_str(ours.to_str())
    pieces.pre_tokenizer = None  # merges alone must build every merged token
    for text in alone:
        assert pieces.encode(text, add_special_tokens=False).tokens == [text]


def test_digits_are_split_one_by_one(folder: Path) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [ours.decode([index]) for index in ours.encode("in 2026").ids] == [
        "in",
        " ",
        "2",
        "0",
        "2",
        "6",
    ]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chats_render_as_the_files_template_says(
    folder: Path, package: Path, hf_tokenizer: Any, generation_prompt: bool
) -> None:
    with GGUFFile(package) as file:
        template = file.require("tokenizer.chat_template", str)
    for chat in CHATS:
        how = {"tokenize": False, "add_generation_prompt": generation_prompt}
        text = hf_tokenizer.apply_chat_template(chat, **how)
        assert text == hf_tokenizer.apply_chat_template(chat, chat_template=template, **how)
        assert text.endswith("<|im_start|>assistant\n") is generation_prompt
        assert chat[-1]["content"] in text


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path, factor: float) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_gguf.TinyLlama(hidden_size=128, num_heads=2, num_kv_heads=1, context_len=131072)
    keys = tiny_gguf.metadata(model) | {"llama.rope.freq_base": 500000.0}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**rope, "rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = np.round(500000.0 ** -(np.arange(32) / 32) / scaled.double().numpy(), 5).astype(
        np.float32
    )
    assert (
        (factors > 1.01) & (factors < factor - 0.01)
    ).any()  # some frequencies are blended, or this would prove little
    tensors = tiny_gguf.gguf_tensors(model, model.weights())
    path = tiny_gguf.write(tmp_path / "m.gguf", tensors | {"rope_freqs.weight": factors}, keys)
    converted = converted_under(tmp_path, path)
    assert json.loads((converted / "config.json").read_text())["rope_scaling"] == rope
    assert read_spec(converted).context_len == 131072
    others = factors * np.float32(1.1)
    path = tiny_gguf.write(tmp_path / "n.gguf", tensors | {"rope_freqs.weight": others}, keys)
    folder = converted_under(tmp_path, path)
    kept = json.loads((folder / "config.json").read_text())["rope_scaling"]
    rotary = RotaryEmbedding.from_config(read_spec(folder).config, 64)
    plain = 1 / rotary.positions_per_radian(500000.0)
    assert kept["rope_type"] == "longrope"
    for length in (64, 131072):
        found, attention = rotary.frequencies(length)
        assert attention == 1.0
        torch.testing.assert_close(found, plain / torch.from_numpy(others))
