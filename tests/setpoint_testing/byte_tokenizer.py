"""A tokenizer whose ids are bytes: id b < 256 is byte b, then a few special tokens. For tests and
tiny random models.

It is a real tokenizer.json (byte-level BPE without merges), so the code that reads it is the code
that serves a model.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from setpoint.frontend.text.tokenizer import BYTE_ALPHABET

BOS_ID = 256
EOS_ID = 257
IM_END_ID = 259
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    return tokenizer


def write_byte_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as a checkpoint folder has them."""
    make_byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
