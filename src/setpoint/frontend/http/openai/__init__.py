"""The OpenAI routes: chat and text completions."""
