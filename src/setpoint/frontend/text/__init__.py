"""Everything that touches text: tokenizer, chat template, incremental detokenizer, stop strings."""
