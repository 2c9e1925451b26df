"""Ollama's API: chats, completions and embeddings under ``/api``, and information about the
model."""
