"""Parts for tests that are useful to every room: scripted executor, harness, tiny models, fake
engine, byte tokenizer."""
