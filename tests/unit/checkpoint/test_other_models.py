"""What is no decoder of text is called what it is, before anything is converted or loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import write

from setpoint.checkpoint.folder import safetensors_file
from setpoint.checkpoint.folder.families import IN_GGUF
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.checkpoint.gguf.architectures import DECODERS, MIXTRAL
from setpoint.checkpoint.gguf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from setpoint.checkpoint.source import locate
from setpoint.checkpoint.spec import read_spec
from setpoint.config.environment import read_environment
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError
from setpoint.launch.parent.configuration import settle
from setpoint_testing.tiny_models import write_tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(path: Path, said: list[str] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(str(path), log=(said if said is not None else []).append)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    safetensors_file.write(path / "model.safetensors", [TensorInfo("x", (1,), "U8")], [b"x"])
    return path


FAMILIES = [
    ("granite", "Granite"),
    ("olmo2", "OLMo 2"),
    ("command-r", "Command R"),
]


@pytest.mark.parametrize(("architecture", "family"), FAMILIES)
def test_a_gguf_file_of_another_family_names_the_way_out(
    tmp_path: Path, cache: Path, architecture: str, family: str
) -> None:
    said: list[str] = []
    keys = {
        "general.architecture": architecture,
        "general.base_model.0.repo_url": "https://huggingface.co/some/model-1B",
    }
    message = refusal(write(tmp_path / "m.gguf", keys=keys), said)
    for part in (
        f"'{architecture}' ({family})",
        "these are: deepseek2, gemma2,",
        "safetensors",
        "--model-path some/model-1B",
    ):
        assert part in message
    assert "--quantization w8a8_int8" in message
    assert said == []
    assert not cache.exists(), "nothing is left of a file that was refused"


@pytest.mark.parametrize("architecture", ["phimoe", "mamba", "never-heard-of"])
def test_a_gguf_file_of_a_family_without_a_way_out_says_where_to_look(
    tmp_path: Path, cache: Path, architecture: str
) -> None:
    message = refusal(write(tmp_path / "m.gguf", keys={"general.architecture": architecture}))
    assert f"'{architecture}'" in message
    assert "docs/supported-models.md" in message
    assert not cache.exists()


def test_a_repository_that_is_no_hub_id_is_not_named(tmp_path: Path) -> None:
    for url in ("https://huggingface.co/a; rm -rf /", "https://example.com/a/b", 7):
        keys = {"general.architecture": "olmo2", "general.base_model.0.repo_url": url}
        message = refusal(write(tmp_path / "m.gguf", keys=keys))
        assert "--model-path FOLDER" in message
        assert "rm -rf" not in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.architecture": "clip"}, "vision projector"),
        ({"general.type": "mmproj"}, "vision projector"),
        ({"general.type": "adapter"}, "LoRA adapter"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.architecture": "bert"}, "encoder"),
        ({"general.architecture": "t5"}, "encoder-decoder"),
        ({"general.architecture": "qwen2vl"}, "vision-language model"),
        ({"split.count": 3}, "one of 3 parts of a split model"),
    ],
)
def test_a_gguf_file_that_is_no_text_model_is_called_what_it_is(
    tmp_path: Path, cache: Path, keys: dict[str, Any], words: str
) -> None:
    assert words in refusal(write(tmp_path / "m.gguf", keys=keys))
    assert not cache.exists()


def test_the_language_model_beside_a_projector_is_named(tmp_path: Path) -> None:
    model = write(tmp_path / "model-Q4.gguf")
    projector = write(tmp_path / "mmproj-F16.gguf", keys={"general.architecture": "clip"})
    assert str(model) in refusal(projector)
    write(tmp_path / "another-Q4.gguf")
    said = refusal(projector)
    assert "another" not in said, "nobody knows to which of the two it belongs"
    assert "usually in the same folder" in said


def test_the_architectures_of_gguf_files_are_listed() -> None:
    """Advice for a model that is too large names a GGUF file only if one would be served."""
    served = {each.architecture for each in (*DECODERS.values(), MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3)}
    assert {*served, "MistralForCausalLM"} == IN_GGUF


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}},
            "vision-language model",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "vision_config": {},
                "text_config": {},
            },
            "vision-language model",
        ),
        ({"architectures": ["InternVLChatModel"], "vision_config": {}}, "vision-language model"),
        (
            {
                "architectures": ["WhisperForConditionalGeneration"],
                "is_encoder_decoder": True,
                "model_type": "whisper",
            },
            "speech model",
        ),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}}, "audio"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "encoder-decoder",
        ),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "encoder"),
        ({"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}, "encoder"),
        ({"architectures": ["ModernBertModel"], "model_type": "modernbert"}, "encoder"),
        (
            {"architectures": ["Qwen2ForSequenceClassification"]},
            "classifier, a reranker or a reward model",
        ),
        (
            {"architectures": ["BertForTokenClassification"], "model_type": "bert"},
            "classifies tokens",
        ),
        ({"_class_name": "UNet2DConditionModel"}, "diffusion model"),
    ],
)
def test_a_folder_of_another_kind_is_called_what_it_is(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    path = folder(tmp_path / "m", **config)
    message = refusal(path)
    assert words in message
    assert str(path) in message
    for name in config.get("architectures", []):
        assert name in message
    with pytest.raises(CheckpointError, match=words):
        read_spec(path)


def test_an_adapter_is_called_one_and_its_base_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(tmp_path)
    assert "LoRA adapter" in message
    assert "org/base" in message
    assert "merge_and_unload" in message


def test_a_pipeline_of_images_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    assert "diffusion pipeline (StableDiffusionPipeline)" in refusal(tmp_path)


def test_the_language_model_of_a_multimodal_gemma_is_served(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "m",
        architectures=["Gemma3ForConditionalGeneration"],
        vision_config={},
        text_config={"hidden_size": 64},
    )
    assert locate(str(path), log=lambda line: None).folder == path


@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_model_that_only_embeds_names_the_option(tmp_path: Path, is_embedding: bool) -> None:
    write_tiny_llama(tmp_path, vocab_size=260)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaModel"]}))
    options = Options.of(
        model_path=str(tmp_path), tokenizer_path=str(tmp_path), is_embedding=is_embedding
    )

    def read() -> object:
        return settle(options, read_environment({}), frozenset({"max_total_tokens"}))

    if is_embedding:
        read()
    else:
        with pytest.raises(CheckpointError, match=r"embedding model .*--is-embedding"):
            read()
