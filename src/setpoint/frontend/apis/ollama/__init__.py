"""Ollama's API: chats, completions and embeddings under ``/api``, and what its clients ask about
the model."""
