"""SGLang's API: generation, embeddings, tokenization, and the routes of health, information and
control."""
