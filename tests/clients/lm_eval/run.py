"""lm-eval: ``local-completions`` with loglikelihood and generation on a task of this folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, URL, check, report, run, tokenizer

TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{{{country}}}}?\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
GENERATE = """\
task: capitals_generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: What is the capital of {{{{country}}}}?\\nAnswer:"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, ignore_punctuation: true}}]
"""
CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}


def evaluate(task: str, template: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        rows = [
            {"country": country, "choices": list(CITIES.values()), "answer": index}
            for index, country in enumerate(CITIES)
        ]
        (home / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (home / f"{task}.yaml").write_text(template.format(data=home / "data.jsonl"))
        server = f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,max_retries=1"
        run(
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            f"{server},tokenizer={tokenizer()},tokenizer_backend=huggingface",
            "--tasks",
            task,
            "--include_path",
            folder,
            "--output_path",
            str(home / "out"),
        )
        (path,) = (home / "out").rglob("results*.json")
        results: dict[str, float] = json.loads(path.read_text())["results"][task]
    return results


@check("loglikelihood of four choices")
def loglikelihood() -> str:
    accuracy = evaluate("capitals", TASK)["acc,none"]
    assert accuracy >= 0.5, accuracy
    return f"accuracy {accuracy:g}"


@check("generate_until")
def generated() -> str:
    return f"exact match {evaluate('capitals_generated', GENERATE)['exact_match,none']:g}"


report()
