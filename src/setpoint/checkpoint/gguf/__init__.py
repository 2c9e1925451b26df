"""GGUF files: reads one, and converts it once into a folder as transformers saves it."""
