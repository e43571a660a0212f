"""Python state as tagged JSON plus named tensors, so that checkpoints need no pickle.

Values that JSON stores exactly are plain JSON. Others are an object with one key, a tag: `{"$tuple": [...]}`. User keys
that begin with `$` get a second one. Tensors (torch) and arrays (numpy) are kept apart and named by their dotted path,
such as `state.optimizer_states.0.state.12.exp_avg`. Torch is used only if the caller has loaded it already.
"""

from __future__ import annotations

import base64
import datetime
import enum
import functools
import itertools
import json
import logging
import math
import operator
import pathlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dlrover_hooks.errors import Corrupt, UnsupportedState

OnUnsupported = Callable[[str, Any], Any]
_PLAIN_INT = 1 << 53
_ARRAY_KINDS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"} | {
    "float16",
    "float32",
    "float64",
    "complex64",
}
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions of decoding a damaged skeleton; nesting that is too deep is a RuntimeError."""
_FACTORIES: dict[str, Any] = {one.__name__: one for one in (bool, int, float, str, list, dict, set, tuple)}
_EXACT = {dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset}
_log = logging.getLogger("dlrover_hooks")
_HINT = "keep it out of the state, or turn it into numbers, strings, lists, dicts and tensors first"


class Flat(NamedTuple):
    """`skeleton`: the tagged JSON. `tensors`: the caller's own tensors and arrays by name, not copied."""

    skeleton: bytes
    tensors: dict[str, Any]


class Known(NamedTuple):
    """The encoding of a dict of nothing but torch tensors, or of such dicts, at an earlier save."""

    form: tuple[Any, ...]
    """Its type, its keys, and for nested dicts all their keys in order and their lengths."""
    names: list[str]
    json: msgspec.Raw


Memo = dict[str, Known]
"""By path. A model's `state_dict` looks the same at every save: with a memo only its keys are compared."""


def flatten(
    tree: Any, *, where: str = "state", on_unsupported: OnUnsupported | None = None, memo: Memo | None = None
) -> Flat:
    """Split `tree` into JSON and tensors whose names begin with `where`.

    `on_unsupported(path, object)` may return a supported replacement, or raise. The caller keeps `memo` from one save
    to the next.

    Raises:
        UnsupportedState: names the full path and the type of what cannot be saved.
    """
    writer = _Writer(on_unsupported, memo)
    try:
        return Flat(_json(writer.encode(tree, where)), writer.tensors)
    except RecursionError:
        raise UnsupportedState(f"{where} is nested too deeply to be saved", hint=_HINT) from None


def _json(encoded: Any) -> bytes:
    try:
        return msgspec.json.encode(encoded)
    except UnicodeEncodeError:  # msgspec refuses lone surrogates, as in file names that are not UTF-8
        return json.dumps(encoded, separators=(",", ":"), default=lambda raw: json.loads(bytes(raw))).encode()


def unflatten(skeleton: bytes | msgspec.Raw, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the tree. `tensors` are inserted as they are; arrays become numpy arrays on the same memory.

    Raises:
        Corrupt: the skeleton is damaged or a tensor that it names is missing.
    """
    try:
        return _decode(json.loads(bytes(skeleton)), tensors)
    except _BROKEN as error:
        raise Corrupt(f"the state's skeleton cannot be read: {type(error).__name__}: {error}") from error


class _Leaves(NamedTuple):
    form: tuple[Any, ...]
    tensors: list[Any]


class _Writer:
    def __init__(self, on_unsupported: OnUnsupported | None, memo: Memo | None) -> None:
        self.tensors: dict[str, Any] = {}
        self._memo = memo
        self._at: dict[int, list[str]] = {}
        """By address, the names of the tensors that begin there: tied weights are stored once."""
        self._on_unsupported = on_unsupported
        self._inside: set[int] = set()
        self._torch: Any = sys.modules.get("torch")
        self._plain = {self._torch.Tensor, self._torch.nn.Parameter} if self._torch is not None else set[type]()
        self._unseen: list[str] = []
        """Names of tensors that are not in `_at` yet."""

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -_PLAIN_INT <= value <= _PLAIN_INT else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            return self._container(value, path)
        return self._leaf(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside:
            raise UnsupportedState(f"{path} contains itself", hint=_HINT)
        self._inside.add(id(value))
        try:
            if type(value) not in _EXACT and not isinstance(value, tuple):
                _narrowed(type(value), path)
            if isinstance(value, dict):
                seen = self._memo is not None and value and type(value) in (dict, OrderedDict)
                leaves = self._leaves(value) if seen else None
                return self._known(value, path, leaves) if leaves is not None else self._dict(value, path)
            if self._is_torch(value, "Size"):
                return {"$size": list(value)}
            if isinstance(value, tuple) and type(value) is not tuple:
                hint = "a named tuple cannot be made without its class: keep tuple(value) or value._asdict()"
                return self._unsupported(value, path, hint)
            if isinstance(value, (set, frozenset)):
                items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
                tag = "$set" if isinstance(value, set) else "$frozenset"
                return {tag: [self.encode(item, f"{path}.{i}") for i, item in enumerate(items)]}
            if set(map(type, value)) == {int} and min(value) >= -_PLAIN_INT and max(value) <= _PLAIN_INT:
                items = list(value)  # a parameter group has many
            else:
                items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        finally:
            self._inside.discard(id(value))

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if isinstance(value, OrderedDict):
            return {"$ordered": self._pairs(value, path)}
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, path)}
        if isinstance(value, defaultdict):
            factory = next((name for name, one in _FACTORIES.items() if one is value.default_factory), None)
            if factory is None and value.default_factory is not None:
                _narrowed(defaultdict, path)
            return {"$default": [factory, self._pairs(value, path)]}
        if all(type(key) is str for key in value):
            return {
                (f"${key}" if key[:1] == "$" else key): self.encode(one, f"{path}.{key}") for key, one in value.items()
            }
        return {"$dict": self._pairs(value, path)}

    def _leaves(self, value: dict[Any, Any]) -> _Leaves | None:
        """The tensors of a dict with no other values, or with only such dicts as values (optimizer state), if it is
        one.
        """
        kinds = set(map(type, value.values()))
        if self._plain.issuperset(kinds):
            return _Leaves((type(value), list(value)), list(value.values()))
        if kinds != {dict}:
            return None
        tensors = list(itertools.chain.from_iterable(map(dict.values, value.values())))
        if not self._plain.issuperset(map(type, tensors)):
            return None
        inner = list(itertools.chain.from_iterable(value.values())), list(map(len, value.values()))
        return _Leaves((type(value), list(value), *inner), tensors)

    def _known(self, value: dict[Any, Any], path: str, leaves: _Leaves) -> Any:
        """As `_dict`, but reuses the encoding if the dict has the same form as before at this path."""
        assert self._memo is not None
        known = self._memo.get(path)
        if known is None or known.form != leaves.form or not self._free(known.names):
            return self._remember(value, path, leaves, self._memo)
        self.tensors.update(zip(known.names, leaves.tensors, strict=True))
        self._unseen += known.names
        return known.json

    def _free(self, names: list[str]) -> bool:
        return not self.tensors or self.tensors.keys().isdisjoint(names)

    def _remember(self, value: dict[Any, Any], path: str, leaves: _Leaves, memo: Memo) -> Any:
        before = len(self.tensors)
        encoded = self._dict(value, path)
        names = list(self.tensors)[before:]
        own = len(names) == len(leaves.tensors) and all(
            map(operator.is_, list(self.tensors.values())[before:], leaves.tensors)
        )
        if own and not any("~" in name for name in names) and {*map(type, value)} in ({str}, {int}):
            memo[path] = Known(leaves.form, names, msgspec.Raw(_json(encoded)))
        return encoded

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [[self.encode(key, f"{path}.<key>"), self.encode(one, f"{path}.{key}")] for key, one in value.items()]

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, enum.Enum):
            return self._unsupported(value, path, f"an enum cannot be named without its class: keep {path}.value")
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
            return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
            return self._array(value, path)
        if isinstance(value, complex):
            return {"$complex": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes" if isinstance(value, bytes) else "$bytearray": _text(value)}
        if isinstance(value, pathlib.PurePath):
            return {"$path": str(value)}
        if isinstance(value, datetime.timedelta):
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        return self._torch_leaf(value, path)

    def _torch_leaf(self, value: Any, path: str) -> Any:
        if self._is_torch(value, "Tensor"):
            return {"$tensor": self._tied(value) or self._name(value, path)}
        if self._is_torch(value, "dtype"):
            return {"$dtype": str(value).removeprefix("torch.")}
        if self._is_torch(value, "device"):
            return {"$device": str(value)}
        if isinstance(value, str):
            _narrowed(type(value), path)
            return str(value)
        return self._unsupported(value, path)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        if value.dtype.name in _ARRAY_KINDS and value.dtype.isnative:
            return {"$array": self._name(value, path)}
        return {"$inline": [value.dtype.str, list(value.shape), _text(value.tobytes())]}

    def _tied(self, tensor: Any) -> str | None:
        """The name of an earlier tensor with the same memory, type and layout."""
        while self._unseen:
            name = self._unseen.pop()
            self._at.setdefault(_address(self.tensors[name]), []).append(name)
        address = _address(tensor)
        return next((name for name in self._at.get(address, ()) if _same(self.tensors[name], tensor)), None)

    def _name(self, tensor: Any, path: str) -> str:
        name, count = path, 1
        while name in self.tensors:
            count += 1
            name = f"{path}~{count}"
        self.tensors[name] = tensor
        if address := _address(tensor):
            self._at.setdefault(address, []).append(name)
        return name

    def _is_torch(self, value: Any, kind: str) -> bool:
        return self._torch is not None and isinstance(value, getattr(self._torch, kind))

    def _unsupported(self, value: Any, path: str, hint: str = _HINT) -> Any:
        if self._on_unsupported is not None:
            ask, self._on_unsupported = self._on_unsupported, None  # the replacement itself must be supported
            try:
                return self.encode(ask(path, value), path)
            finally:
                self._on_unsupported = ask
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedState(f"{path} is a {kind}, which cannot be saved without pickle", hint=hint)


@functools.cache
def _narrowed(kind: type, path: str) -> None:
    """Warn once that an object loses its class, because classes are not stored."""
    if kind is defaultdict:
        _log.warning("%s is a defaultdict whose factory cannot be saved: it comes back without one", path)
    else:
        base = next(one for one in kind.__mro__ if one in _EXACT or one is str)
        _log.warning("%s is a %s.%s: it comes back as a %s", path, kind.__module__, kind.__qualname__, base.__name__)


def _address(tensor: Any) -> int:
    """Address of the first byte of a torch tensor; 0 if it has no bytes, or several buffers (sparse tensors)."""
    try:
        return getattr(tensor, "_local_tensor", tensor).data_ptr()
    except (RuntimeError, AttributeError):
        return 0


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors that begin at one address have the same type, shape, layout and sign."""
    return _way(one) == _way(other)


def _way(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    shape = (tensor.shape, getattr(tensor, "placements", None), local.shape, local.stride())
    return (*shape, local.dtype, local.device, local.is_conj(), local.is_neg())


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, body), *_ = value.items()
        if key[:1] == "$" and key[:2] != "$$":
            return _TAGS[key](body, tensors)
    return {(key[1:] if key[:1] == "$" else key): _decode(one, tensors) for key, one in value.items()}


def _pairs(body: Any, tensors: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors), _decode(one, tensors)) for key, one in body]


def _array(name: str, tensors: Mapping[str, Any]) -> Any:
    found = tensors[name]
    return found.numpy() if hasattr(found, "numpy") else found


def _default(body: Any, tensors: Mapping[str, Any]) -> Any:
    name, pairs = body
    return defaultdict(None if name is None else _FACTORIES[name], _pairs(pairs, tensors))


def _size(body: Any) -> Any:
    import torch

    return torch.Size(body)


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


_KIND = re.compile(r"[<>|][a-zA-Z]\d+(\[\w+\])?")
"""The form of `dtype.str`. NumPy also reads aliases, some with a warning; our files contain none."""


def _numbers(kind: str, data: str) -> np.ndarray[Any, Any]:
    if not _KIND.fullmatch(str(kind)):
        raise ValueError(f"{kind!r} is no dtype as NumPy writes it")
    dtype = np.dtype(str(kind))
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} would hold pointers")
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype)


_TAGS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$int": lambda body, _: int(body, 16),
    "$float": lambda body, _: float(body),
    "$tuple": lambda body, tensors: tuple(_decode(body, tensors)),
    "$set": lambda body, tensors: set(_decode(body, tensors)),
    "$frozenset": lambda body, tensors: frozenset(_decode(body, tensors)),
    "$ordered": lambda body, tensors: OrderedDict(_pairs(body, tensors)),
    "$dict": lambda body, tensors: dict(_pairs(body, tensors)),
    "$counter": lambda body, tensors: Counter(dict(_pairs(body, tensors))),
    "$default": _default,
    "$size": lambda body, _: _size(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$bytearray": lambda body, _: bytearray(base64.b64decode(body)),
    "$complex": lambda body, tensors: complex(*_decode(body, tensors)),
    "$path": lambda body, _: pathlib.Path(body),
    "$timedelta": lambda body, _: datetime.timedelta(*body),
    "$scalar": lambda body, _: _numbers(*body)[0],
    "$inline": lambda body, _: _numbers(body[0], body[2]).reshape(body[1]),
    "$array": _array,
    "$tensor": lambda body, tensors: tensors[body],
    "$dtype": lambda body, _: _dtype(body),
    "$device": lambda body, _: _device(body),
}
