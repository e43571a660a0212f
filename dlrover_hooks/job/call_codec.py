"""Encodes arguments and results of calls between workers: MessagePack, with the raw memory of arrays and tensors.

Nothing is pickled. Supported are None, bool, int, float, str, bytes, lists, tuples, dicts with keys of these types,
NumPy arrays and scalars, and dense torch tensors, which arrive on the CPU. Arrays and tensors that arrive can be
written to. A value of another type is refused, also if its type is derived from that of an array or a tensor: a masked
array would arrive without its mask.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_hooks.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

_ARRAY, _TENSOR, _TUPLE = 1, 2, 3
_PLAIN = (type(None), bool, int, float, str, bytes, bytearray)
MOST_BYTES = 1 << 31
"""Largest size of an encoded value."""
_TENSORS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}
_HINT = "send numbers, text, bytes, lists, tuples, dicts, NumPy arrays and torch tensors"


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(value: Any) -> bytes:
    """The value as bytes. Raises UsageError for a value that is not supported, or has more than 2 GiB."""
    try:
        data = msgspec.msgpack.encode(_tagged(value), enc_hook=_extension)
    except RecursionError:
        what = "a value that contains itself, or is nested too deeply"
        raise UsageError(f"{what}: it cannot be sent to another worker", hint=_HINT) from None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(f"{error}: it cannot be sent to another worker", hint=_HINT) from None
    _check_size(len(data), "a value")
    return data


def _check_size(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise UsageError(
            f"{what} of {size} bytes: at most {MOST_BYTES} bytes can be sent to another worker at a time",
            hint="Send it in parts.",
        )


def decode(data: bytes | bytearray) -> Any:
    """The value that `encode` was given. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, ext_hook=_value)


def _tagged(value: Any) -> Any:
    """`value` with its tuples marked as extensions, because MessagePack only has lists."""
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, encode(list(value)))
    if isinstance(value, list):
        return [_tagged(one) for one in value]
    if isinstance(value, dict):
        return {_key(key): _tagged(one) for key, one in value.items()}
    return _plain(value)


def _key(key: Any) -> Any:
    """A tuple needs no mark as a key: msgspec decodes arrays in keys as tuples."""
    return tuple(_key(one) for one in key) if type(key) is tuple else _plain(key)


def _plain(value: Any) -> Any:
    """`value` itself. Raises TypeError if it would be decoded as another type."""
    kind = type(value)
    if kind in _PLAIN or _is_tensor(value) or _is_numpy(value):
        return value
    raise TypeError(f"an object of type {kind.__name__}")


def _is_numpy(value: Any) -> bool:
    """NumPy is not imported for this: it is a quarter of the start of a master, which sends no arrays."""
    if "numpy" not in sys.modules:
        return False
    import numpy as np

    return type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic)


def _is_tensor(value: Any) -> bool:
    """By the name of the type, because another thread may be importing torch."""
    return (type(value).__module__, type(value).__qualname__) in _TENSORS


def _extension(value: Any) -> Any:
    if _is_tensor(value):
        return msgspec.msgpack.Ext(_TENSOR, _packed_tensor(value))
    if not _is_numpy(value):
        raise TypeError(f"an object of type {type(value).__name__}")
    import numpy as np

    if isinstance(value, np.generic):
        item = value.item()
        if type(item) not in _PLAIN:
            raise TypeError(f"a NumPy scalar of type {value.dtype}")
        return item
    return msgspec.msgpack.Ext(_ARRAY, _packed(value))


def _packed(value: np.ndarray[Any, Any]) -> bytes:
    import numpy as np

    if value.dtype.hasobject:
        raise TypeError("a NumPy array of Python objects")
    if value.dtype.fields is not None:
        raise TypeError("a NumPy array of structures")
    if np.dtype(value.dtype.str) != value.dtype:
        raise TypeError(f"a NumPy array of {value.dtype}")
    _check_size(value.nbytes, "a NumPy array")
    return msgspec.msgpack.encode(_Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()))


def _packed_tensor(value: Any) -> bytes:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise TypeError(
            f"a tensor that is not dense (layout {value.layout}), or is quantized, nested or without memory"
        )
    _check_size(value.numel() * value.element_size(), "a tensor")
    flat = value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    name = str(flat.dtype).removeprefix("torch.")
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return msgspec.msgpack.encode(_Array(name, tuple(flat.shape), raw))


def _value(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(decode(bytes(data)))
    if code not in (_ARRAY, _TENSOR):
        raise msgspec.ValidationError(f"there is no extension {code}")
    found = msgspec.msgpack.decode(data, type=_Array)
    if code == _ARRAY:
        import numpy as np

        return np.frombuffer(bytearray(found.data), np.dtype(found.dtype)).reshape(found.shape)
    import torch

    raw = (
        torch.frombuffer(bytearray(found.data), dtype=torch.uint8) if found.data else torch.empty(0, dtype=torch.uint8)
    )
    return raw.view(getattr(torch, found.dtype)).reshape(found.shape)
