"""Setpoint: an LLM serving engine that speaks SGLang's and OpenAI's language and tunes itself."""

__version__ = "0.1.0"

__all__ = ["__version__"]
