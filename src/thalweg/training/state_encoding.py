"""A state dict as JSON and named tensors: the content of a pickle, without running code on reading.

Numbers, text, None and lists are plain JSON; any other value is an object with one key, the tag of
its type:

    (1, 2)                          {"tuple": [1, 2]}
    {"lr": 0.1}                     {"dict": {"lr": 0.1}}
    {0: None}                       {"items": [[0, null]]}
    a tensor, at state[0]["x"]      {"tensor": "0.x"}, and its values beside the JSON by that name

Decoded values are bitwise equal and of the same type, with two exceptions: tensors are plain,
contiguous and on the CPU, and an object that occurs twice becomes two.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from thalweg.errors import CheckpointError
from thalweg.members.agreement import Json

MAX_NESTING_COUNT = 100
MISREAD_ERRORS = (  # of data that `pack` didn't make
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    *(SafetensorError, struct.error),
)
Kinds = dict[str, tuple[list[int], str]]  # shape and type of tensors, by name
_UNPACKABLE_REMEDY = "keep only tensors, numbers, text and plain containers of these in it"
_MIN_HEX_INTEGER = 2**63  # Python limits the decimal digits that it reads
_NUMPY_KINDS = "biufcmM"  # numbers and times: not objects, whose bytes are addresses
_STORED = {  # by every version of safetensors; complex128 as pairs of float64
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (dict, float, int, list, set, str)},
}
Tensors = dict[str, Tensor]


def kinds_of(tensors: Mapping[str, Tensor]) -> Kinds:
    return {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}


def places_for(kinds: Kinds, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers for tensors of these kinds: those in `own` of the same kind, which saves memory, or
    new ones."""
    places = {}
    for name, (shape, dtype) in kinds.items():
        kind = getattr(torch, dtype)
        place = own.get(name)
        if place is None or list(place.shape) != shape or place.dtype != kind:
            place = torch.empty(shape, dtype=kind)
        places[name] = place
    return places


def pack(state: Any, name: str) -> tuple[Json, Tensors]:
    """The state as JSON, and its tensors by their place in it; errors call the state `name`.

    Tensors that lie in memory as a file wants them are not copied."""
    packer = _Packer(name)
    return packer.pack(state, ()), packer.tensors


def unpack(tree: Json, tensors: Tensors) -> Any:
    """The state from which `pack` made these two; ValueError if it didn't."""
    try:
        return _unpack(tree, tensors)
    except (*MISREAD_ERRORS, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


def _unpack(tree: Json, tensors: Tensors) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](_unpack(content, tensors))
    return _WITH_TENSORS[tag](content, tensors) if tag in _WITH_TENSORS else _LEAVES[tag](content)


def _attributes(content: Any, tensors: Tensors) -> Any:
    whole = _unpack(content[0], tensors)
    if type(whole) not in (Counter, OrderedDict):
        raise TypeError(f"a {type(whole).__name__} has no attributes")
    vars(whole).update(_unpack(content[1], tensors))
    return whole


def _array(content: Any, tensors: Tensors) -> Any:
    name, dtype, shape = content
    return tensors[name].numpy().view(_kind(dtype)).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return dtype


def _kind(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _NUMPY_KINDS:
        raise TypeError(f"{text} is no type of numbers")
    return dtype


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "Counter": lambda items: Counter(dict(items)),
    "OrderedDict": OrderedDict,
    "Size": torch.Size,
    "frozenset": frozenset,
    "items": dict,
    "set": set,
    "tuple": tuple,
}
_WITH_TENSORS: dict[str, Callable[[Any, Tensors], Any]] = {
    "array": _array,
    "attributes": _attributes,
    # in a file it may lie unaligned
    "complex tensor": lambda name, tensors: torch.view_as_complex(tensors[name].clone()),
    "defaultdict": lambda x, tensors: defaultdict(_FACTORIES[x[0]], _unpack(x[1], tensors)),
    "dict": lambda items, tensors: {key: _unpack(items[key], tensors) for key in items},
    "tensor": lambda name, tensors: tensors[name],
}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "bytearray": lambda text: bytearray(b64decode(text)),
    "bytes": b64decode,
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "device": torch.device,
    "dtype": _dtype,
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "int": lambda text: int(text, 16),
    "numpy": lambda parts: np.frombuffer(b64decode(parts[1]), _kind(parts[0]))[0],
    "str": lambda text: b64decode(text).decode("utf-8", "surrogatepass"),
}
_ENCODED: dict[type, Callable[[Any], str]] = {  # leaves that JSON lacks
    bytearray: lambda data: _text(data),
    bytes: lambda data: _text(data),
    complex: lambda x: struct.pack(">dd", x.real, x.imag).hex(),
    float: lambda x: struct.pack(">d", x).hex(),
    int: hex,
    str: lambda text: _text(text.encode("utf-8", "surrogatepass")),
    torch.device: str,
    torch.dtype: lambda kind: str(kind).removeprefix("torch."),
}


class _Packer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: Tensors = {}
        self.storages: set[int] = set()

    def pack(self, x: Any, path: tuple[Any, ...]) -> Json:
        if len(path) > MAX_NESTING_COUNT:
            raise CheckpointError(
                f"{self.name} is nested more than {MAX_NESTING_COUNT} deep, or contains itself",
                _UNPACKABLE_REMEDY,
            )
        kind = type(x)
        if kind is dict and all(type(key) is str and _is_unicode(key) for key in x):
            return {"dict": {key: self.pack(value, (*path, key)) for key, value in x.items()}}
        if kind is dict:
            return {"items": self.items(x, path)}
        if kind is list:
            return self.sequence(x, path)
        if kind in (tuple, torch.Size):
            return {kind.__name__: self.sequence(x, path)}
        if kind in (set, frozenset):
            return self.members(x, path)
        if kind in (Counter, OrderedDict):
            whole: Json = {kind.__name__: self.items(x, path)}
            attributes = vars(x)  # a module's state_dict() has format versions there
            return {"attributes": [whole, self.pack(attributes, path)]} if attributes else whole
        if kind is defaultdict and x.default_factory in _FACTORIES.values():
            factory = x.default_factory and x.default_factory.__name__
            return {"defaultdict": [factory, self.pack(dict(x), path)]}
        if isinstance(x, Tensor):
            return self.tensor(x, path)
        if kind is np.ndarray and x.dtype.kind in _NUMPY_KINDS:
            values = torch.from_numpy(np.array(x, order="C").reshape(-1).view(np.uint8))
            return {"array": [self.place(values, path), x.dtype.str, list(x.shape)]}
        packed = _leaf(x)
        if packed is None and x is not None:
            article = "an" if kind.__name__[0] in "aeiouAEIOU" else "a"
            raise CheckpointError(
                f"{self.at(path)} is {article} {kind.__name__}", _UNPACKABLE_REMEDY
            )
        return packed

    def sequence(self, x: Iterable[Any], path: tuple[Any, ...]) -> list[Json]:
        return [self.pack(item, (*path, index)) for index, item in enumerate(x)]

    def items(self, x: dict[Any, Any], path: tuple[Any, ...]) -> list[Json]:
        return [[self.key(key, path), self.pack(x[key], (*path, key))] for key in x]

    def members(self, x: set[Any] | frozenset[Any], path: tuple[Any, ...]) -> Json:
        """The members of a set in sorted order, as a set's own order differs between processes."""
        return {type(x).__name__: sorted((self.key(m, path) for m in x), key=json.dumps)}

    def key(self, x: Any, path: tuple[Any, ...]) -> Json:
        """A key of a dict or set. Keys are found by value, so a tensor can't be one."""
        if type(x) is frozenset:
            return self.members(x, path)
        if type(x) is tuple:
            return {"tuple": [self.key(member, path) for member in x]}
        packed = _leaf(x)
        if packed is None and x is not None:
            raise CheckpointError(
                f"{self.at(path)} has a key of type {type(x).__name__}",
                "use numbers, text or tuples of these for keys",
            )
        return packed

    def tensor(self, x: Tensor, path: tuple[Any, ...]) -> Json:
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{self.at(path)} is a {type(x).__name__}, not a plain tensor", _UNPACKABLE_REMEDY
            )
        if x.layout is not torch.strided or x.dtype not in _STORED or x.device.type == "meta":
            raise CheckpointError(
                f"{self.at(path)} is a tensor of {x.dtype}, {x.layout}, on {x.device}",
                "make it a dense one of a common type",
            )
        plain = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype is torch.complex128:
            return {"complex tensor": self.place(torch.view_as_real(plain), path)}
        return {"tensor": self.place(plain, path)}

    def place(self, values: Tensor, path: tuple[Any, ...]) -> str:
        """Store a tensor under a name that shows its path, in a storage that no other tensor
        shares."""
        storage = values.untyped_storage()
        if storage.nbytes() != values.nbytes or storage.data_ptr() in self.storages:
            values = values.clone()
        self.storages.add(values.untyped_storage().data_ptr())
        wanted = ".".join(str(part) for part in path) if path else self.name
        wanted = name = wanted.encode("utf-8", "backslashreplace").decode()
        count = 1
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            count += 1
            name = f"{wanted}~{count}"
        self.tensors[name] = values
        return name

    def at(self, path: tuple[Any, ...]) -> str:
        return self.name + "".join(f"[{part!r}]" for part in path)


def _leaf(x: Any) -> Json:
    """The JSON of a value without members; None for None, and for types that can't be packed."""
    if _is_json(x):
        plain: Json = x
        return plain
    if type(x) in _ENCODED:
        return {type(x).__name__: _ENCODED[type(x)](x)}
    if isinstance(x, np.generic) and x.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [x.dtype.str, _text(x.tobytes())]}
    return None


def _is_json(x: Any) -> bool:
    """True for numbers and text that JSON holds exactly."""
    if type(x) is int:
        return abs(x) < _MIN_HEX_INTEGER
    if type(x) is float:
        return isfinite(x)
    return type(x) is bool or (type(x) is str and _is_unicode(x))


def _is_unicode(text: str) -> bool:
    """False for text with halves of surrogate pairs, as in undecodable file names: JSON can't hold
    them."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _text(data: bytes | bytearray) -> str:
    return b64encode(data).decode("ascii")
