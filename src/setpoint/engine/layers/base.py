"""The base of every module here: ``nn.Module`` as a tree of names and parameters, without what only
training needs."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """Calling a layer is calling its ``forward`` (there are no hooks), and its children and
    parameters are plain attributes.

    A step at one token makes 300 module calls and as many look-ups for 30 layers; this saves a good
    third of their time. NOTE: assign parameters by name; ``nn.Module.to`` and the like bypass
    ``__setattr__`` and must not be used.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in cls.__dict__:
            cls.__call__ = cls.forward

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value
