"""Finds a model, reads its config and, if it is a GGUF file, converts it once; all before torch is
imported.

``source.locate`` turns what the user named into a Hugging Face-style folder; ``spec.read_spec``
turns that folder into a ModelSpec. The engine loads the weights; this package never does.
"""
