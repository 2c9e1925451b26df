"""The comparison on GGUF files: the files that it makes, what counts as cold, and that whatever goes
wrong is said in the table."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf_shapes
import ggufs
import page_cache
import pytest
from compare import Entrant, Run
from contenders import Contender, Sample, StartError
from gguf.constants import GGMLQuantizationType, TokenType
from ggufs import INT8, OURS, Figures, Measuring, Memory, Player
from peers import install
from peers.catalog import ik_llama_cpp, instructions_missing
from single_batches import BatchError, Rates, read_llama_bench
from workloads import QUICK, VOCAB

from setpoint.checkpoint.source import locate
from setpoint.checkpoint.spec import read_spec
from setpoint_testing import tiny_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
}
W1, W2 = QUICK[:2]


def vocabulary(path: Path, *, has_scores: bool) -> Path:
    texts = tiny_gguf.byte_vocabulary(SIZES["vocab_size"])
    kinds = [
        TokenType.CONTROL if text in tiny_gguf.SPECIALS else TokenType.NORMAL for text in texts
    ]
    keys = {
        "tokenizer.ggml.model": "gemma4" if has_scores else "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if has_scores:
        keys |= {"tokenizer.ggml.scores": [-1000.0] * len(texts)}
        keys |= {"tokenizer.ggml.unknown_token_id": 0}
        del keys["tokenizer.ggml.pre"]
    return tiny_gguf.write(path, {}, keys)


@pytest.mark.parametrize("shape", list(gguf_shapes.CONFIGS))
def test_a_file_of_a_shape_is_that_model(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = gguf_shapes.CONFIGS[shape] | SIZES
    words = vocabulary(tmp_path / "words.gguf", has_scores=config["model_type"] == "gemma3_text")
    path = tmp_path / f"{shape}-BF16.gguf"
    gguf_shapes.write_bf16(path, shape, config, words)
    source = locate(str(path), log=lambda line: None)
    spec = read_spec(source.folder)
    written = json.loads((source.folder / "config.json").read_text())
    same = ("model_type", "rms_norm_eps", "rope_theta", *SIZES)
    assert {name: written[name] for name in same} == {name: config[name] for name in same}
    assert written["tie_word_embeddings"]
    assert spec.vocab_size == SIZES["vocab_size"]
    if "rope_scaling" in config:
        kept = written["rope_scaling"]
        assert {name: kept[name] for name in config["rope_scaling"]} == config["rope_scaling"]
    if "sliding_window" in config:
        assert written["sliding_window"] == config["sliding_window"]


def test_only_ids_with_a_text_have_an_embedding(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    config = gguf_shapes.CONFIGS["qwen3-1.7b"] | SIZES
    words = vocabulary(tmp_path / "words.gguf", has_scores=False)
    gguf_shapes.write_bf16(tmp_path / "model.gguf", "model", config, words)
    first = gguf.GGUFReader(tmp_path / "model.gguf").tensors[0]
    assert (first.name, first.tensor_type) == ("token_embd.weight", GGMLQuantizationType.BF16)
    is_used = np.asarray(first.data).reshape(SIZES["vocab_size"], -1).any(axis=1)
    texts = tiny_gguf.byte_vocabulary(SIZES["vocab_size"])
    assert not is_used[: VOCAB[0]].any()
    for index in range(VOCAB[0], len(texts)):
        assert is_used[index] == gguf_shapes.is_text(texts[index]), texts[index]
    assert gguf_shapes.is_text("Ġw")
    assert not gguf_shapes.is_text("Ã"), "the first of the two bytes of a letter"


def test_a_file_is_cold_or_it_is_said(tmp_path: Path) -> None:
    """Whether pages can be dropped depends on the file system; memory keeps its own."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 22))
    page_cache.read_into_cache(path)
    assert page_cache.share_in_cache(path) == 1
    reason = None
    try:
        page_cache.drop_from_cache(path)
    except RuntimeError as error:
        reason = str(error)
    share = page_cache.share_in_cache(path)
    assert share == 0 if reason is None else share > 0 and "stay in the page cache" in reason


def test_llama_bench_is_read() -> None:
    tests = [
        {"n_prompt": 64, "n_gen": 0, "samples_ts": [800.0, 820.0]},
        {"n_prompt": 0, "n_gen": 8, "samples_ts": [90.0, 91.0]},
    ]
    assert read_llama_bench(json.dumps(tests)) == Rates([800.0, 820.0], [90.0, 91.0])
    with pytest.raises(BatchError, match="llama-bench printed"):
        read_llama_bench(json.dumps(tests[:1]))


def test_a_build_without_the_machines_instructions_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n")
    native = "system_info: AVX2 = 1 | AVX512 = 1 | AVX512_VBMI = 0 | AVX512_VNNI = 1 |"
    assert instructions_missing(native, cpuinfo) is None
    wheel = "system_info: AVX2 = 1 | AVX512 = 0 | AVX512_VBMI = 0 | AVX512_VNNI = 0 |"
    assert "does not name AVX512, AVX512_VNNI," in str(instructions_missing(wheel, cpuinfo))
    assert "does not name AVX2," in str(instructions_missing("", cpuinfo))
    cpuinfo.write_text("processor: 0\nflags\t\t: fpu avx2\n")
    assert instructions_missing(wheel, cpuinfo) is None, "there is nothing that it lacks"


def test_requests_wait_for_a_slot_of_ik_llama_cpp(tmp_path: Path) -> None:
    command = ik_llama_cpp(tmp_path, Path("model"), "Q4_0", "4 bit", 3).command(1)
    slots = int(command[command.index("--parallel") + 1])
    assert slots < ggufs.NUM_SLOTS
    assert command[command.index("--ctx-size") + 1] == str(slots * 1280)
    assert command[command.index("--threads") + 1] == "3"


def test_what_the_sdist_lacks_fills_its_template(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "build-info.cpp.in").write_text('commit "@BUILD_COMMIT@" @BUILD_NUMBER@')
    script = tmp_path / "script.cmake"
    script.write_text(install.IK_LLAMA_BUILD_INFO.replace("PIN", install.IK_LLAMA))
    subprocess.run(["cmake", "-P", str(script)], cwd=tmp_path, check=True)
    made = (tmp_path / "common" / "build-info.cpp").read_text()
    assert made.strip() == f'commit "{install.IK_LLAMA}" 0'


def table(figures: Figures, names: list[str]) -> dict[str, list[str]]:
    rows = ggufs.rows_of(figures, names, [W1, W2], (512, 128))
    lines = ggufs.table({"a-Q4_0": rows}, names).splitlines()[2:]
    return {line.split(" | ")[1]: line.strip("| ").split(" | ")[2:] for line in lines}


def test_the_table_has_ratios_and_reasons() -> None:
    run = Run({"W1": {}, "W2": {}}, start_s={OURS: [2.0], "llama.cpp": [1.0]})
    run.results["W1"] = {
        OURS: [Sample(1.0, ttft_s=0.1, decode_s=1.0), Sample(1.0, ttft_s=0.1, decode_s=1.0)],
        "llama.cpp": [Sample(1.0, ttft_s=0.2, decode_s=2.0)] * 2,
    }
    run.results["W2"] = {OURS: [Sample(1.0)], "ik": [Sample(1.0, errors=("it | ended",))]}
    figures = Figures(1000, run)
    figures.memory = {OURS: [Memory(3000, 100, 2000)], "ik": [Memory(2500, 100, 1000)]}
    figures.prompt_rates = {OURS: [10.0]}
    figures.failed = {"ik": "code -6"}
    names = [OURS, INT8, "llama.cpp", "ik"]
    found = table(figures, names)
    decode = found["W1 decode, tok/s"]
    assert decode[:4] == ["7.00 (7.00 – 7.00)", "–", "3.50 (3.50 – 3.50)", "–"]
    assert decode[4:] == ["2.00 ×", "–", "–", "–"]
    assert found["W1 TTFT, ms"][4] == "2.00 ×"
    assert found["W2 output, tok/s"][3] == "failed: it / ended"
    assert found["memory beside the pool, × the file"][0].startswith("1.00")
    assert found["memory beside the pool, × the file"][5].startswith("1.50 ×")
    assert found["warm start, s"][4].startswith("0.50 ×")
    assert found["pp512, tok/s"][3] == "failed: code -6"
    assert "cold start, s" not in found, "nothing was measured"


def player(name: str, start: Any, batches: Any, absent: str | None = None) -> Player:
    entrant = Entrant(name, "", start)
    return Player(entrant, entrant, batches, absent=absent)


def test_who_does_not_start_has_no_later_turn(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    calls: list[str] = []

    class Works:
        name = OURS

        async def ready(self) -> None:
            calls.append(OURS)

        def close(self) -> None: ...

    def start() -> Contender:
        return Works()  # type: ignore[return-value]

    def refuses() -> Contender:
        calls.append("ik")
        raise StartError("it has AVX2 at most")

    def batches(prompt: int, generated: int) -> Rates:
        return Rates([float(prompt)], [float(generated)])

    everybody = [
        player(OURS, start, batches),
        player("ik", refuses, batches),
        player("llama.cpp", start, batches, absent="not installed"),
    ]
    measuring = Measuring(model, everybody, [ggufs.BATCHES], [], (64, 8))
    asyncio.run(measuring.measure(2))
    assert measuring.figures.run.skipped == {
        "llama.cpp": "not installed",
        "ik": "it has AVX2 at most",
    }
    assert calls.count("ik") == 1
    assert measuring.figures.prompt_rates == {OURS: [64.0, 64.0]}
    assert len(measuring.figures.bandwidth) == 3
    assert "ik: skipped: it has AVX2 at most" in ggufs.notes("model", measuring.figures)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no W3; there are answers, W1, W2, W4"):
        ggufs.asked_parts(ggufs.parse(["--only", "W1,W3"]))
    everybody = [player(OURS, lambda: None, lambda p, g: Rates([], []))]
    with pytest.raises(ValueError, match="no vLLM; there are setpoint"):
        ggufs.chosen(everybody, "vLLM")
