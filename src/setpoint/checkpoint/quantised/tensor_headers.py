"""The tensors of a quantised folder, from their headers, with the checks that all formats share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from setpoint.checkpoint.folder.configfile import ConfigFile, short_repr
from setpoint.checkpoint.folder.matching_names import newly_matched
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.core.errors import CheckpointError
from setpoint.core.quantised import KEY, Codes

SCALES = ("F16", "BF16", "F32")
CODES = ("I32",)
LARGEST_GROUP = 1 << 28


class StoredTensors:
    """Tensor name -> header and file. A format takes the tensors that it understands."""

    def __init__(self, folder: Path, stored: Mapping[str, tuple[TensorInfo, Path]]) -> None:
        self._folder = folder
        self._stored = stored
        self.taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def named(self, ending: str) -> Iterator[str]:
        """The names that end so, without the ending."""
        return (name.removesuffix(ending) for name in self._stored if name.endswith(ending))

    def take(
        self,
        name: str,
        dtypes: Collection[str],
        shape: tuple[int, ...] | None = None,
        *,
        dims: int = 2,
    ) -> TensorInfo:
        """The header of a tensor that a format uses. Raises CheckpointError unless it is there, of
        one of the types and of this shape, or of ``dims`` dimensions, and has numbers."""
        if name not in self._stored:
            raise CheckpointError(
                f"Tensor {name!r} is missing in {self._folder}; its matrix cannot be read without."
            )
        tensor = self._stored[name][0]
        if tensor.dtype not in dtypes:
            self.fail(name, f"holds {tensor.dtype}; it should hold {' or '.join(dtypes)}")
        if 0 in tensor.shape:
            self.fail(name, f"has shape {list(tensor.shape)}; it is empty, so there is no matrix")
        if shape is not None and tensor.shape != shape:
            self.fail(name, f"has shape {list(tensor.shape)}; it should be {list(shape)}")
        if shape is None and len(tensor.shape) != dims:
            self.fail(name, f"has shape {list(tensor.shape)}; it should have {dims} dimensions")
        self.taken.add(name)
        return tensor

    def take_codes(self, codes: Codes, outputs: int, inputs: int) -> None:
        """Take the tensor of these codes, of [outputs, inputs] of them."""
        dtypes = ("I8",) if codes.word_axis is None else CODES
        self.take(codes.name, dtypes, codes.stored_shape(outputs, inputs))

    def take_scales(
        self, name: str, counts: tuple[int, int], dtypes: Collection[str] = SCALES
    ) -> None:
        """Take scales [along N, along K]; dimensions of one may be left out."""
        dims = len(self.shape(name)) if name in self else 0
        shape = self.take(name, dtypes, dims=dims).shape
        if [each for each in shape if each != 1] != [each for each in counts if each != 1]:
            self.fail(name, f"has shape {list(shape)}; it should be {list(counts)}")

    def check_no_matrix(self, name: str) -> None:
        """Raise CheckpointError if the folder has the matrix itself besides its codes."""
        if name in self._stored and name not in self.taken:
            self.fail(name, "is stored twice: as it is, and as codes and scales")

    def fail(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"Tensor {name!r} in {self._stored[name][1]} {problem}.")

    def dtype(self, name: str) -> str:
        return self._stored[name][0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name][0].shape

    def file(self, name: str) -> Path:
        return self._stored[name][1]

    def left(self) -> Iterator[TensorInfo]:
        """The tensors that no format took."""
        return (tensor for name, (tensor, _) in self._stored.items() if name not in self.taken)


class Section:
    """The values of ``quantization_config``. Every error names the key and the file. where: the key
    of the values in the file; "": they are the file."""

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = KEY) -> None:
        self.values = values
        self._where = where
        self._file = ConfigFile(path, {})

    def inner(self, key: str, values: Mapping[str, Any]) -> Section:
        return Section(self._file.path, values, self._path(key))

    def fail(self, key: str, problem: str) -> NoReturn:
        self._file.fail(self._path(key), problem)

    def _path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def choice(self, key: str, known: Collection[Any], default: Any = None) -> Any:
        """The value of ``key``, one of ``known``."""
        value = self.values.get(key)
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in known):
            self.fail(key, f"is {short_repr(value)}; served are {', '.join(map(repr, known))}")
        return value

    def group(self, key: str, *, default: int | None = None) -> int:
        """The value of ``key``, the number of inputs that share a scale; -1: all."""
        value = self.values.get(key, default)
        if type(value) is not int or value == 0 or not -1 <= value <= LARGEST_GROUP:
            self.fail(key, f"must be a positive integer or -1, not {short_repr(value)}")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """The value of ``key``, two positive integers."""
        value = self.values.get(key)
        first, second = value if isinstance(value, list) and len(value) == 2 else (0, 0)
        if type(first) is not int or type(second) is not int or min(first, second) < 1:
            self.fail(key, f"must be two positive integers, not {short_repr(value)}")
        return first, second

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {short_repr(value)}")
        return value

    def names(self, key: str) -> list[str]:
        """The value of ``key``, a list of strings; null and absent are empty."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.fail(key, f"must be a list of names, not {short_repr(value)}")
        return value


Expression = tuple[Section, str, str]
"""A regular expression of names of modules, after the section and the key that it stands in."""


def first_matches(expressions: Sequence[Expression], paths: Sequence[str]) -> dict[str, int]:
    """Module -> the index of the first expression that matches its name; without those that none
    matches."""
    found: dict[str, int] = {}
    answers = newly_matched([text for _, _, text in expressions], paths)
    for index, ((section, key, text), answer) in enumerate(zip(expressions, answers, strict=False)):
        if isinstance(answer, str):
            section.fail(key, f"has the expression {short_repr(text)}, which {answer}")
        found.update(dict.fromkeys(answer, index))
    return found


def group_of(tensors: StoredTensors, name: str, group: int, inputs: int) -> int:
    """The number of inputs that share a scale of this tensor of codes."""
    if group == -1 or group == inputs:
        return inputs
    if inputs % group:
        tensors.fail(name, f"has {inputs} inputs, which groups of {group} do not divide")
    return group
