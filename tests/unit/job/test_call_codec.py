"""Arguments and results of calls arrive as they were sent, or are refused: nothing is pickled, no type is lost."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.job import call_codec


def sent(value: Any) -> Any:
    """The value as the other worker receives it."""
    data = call_codec.encode(value)
    assert isinstance(data, bytes)
    return call_codec.decode(data)


# ---- plain values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 1 << 62, -(1 << 63), (1 << 64) - 1, 0.5, float("inf"), "", "Größe", b"", b"\x00\xff",
        [], [1, [2, [3]]], {}, {"a": {"b": [1, None]}}, {1: 2, b"k": 3, None: 4, 0.5: 5}, {(1, 2): "tuple"},
        (), (1,), (1, (2, ("x", ()))), [(1, 2), [3, (4,)]], {"a": (1, {"b": (b"c", None)})}, ({"a": [(1,)]},),
        list(range(1000)), "x" * 100_000,
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_were_sent(value: Any) -> None:
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value), "with the types of everything in it"


def test_not_a_number_arrives() -> None:
    found = sent([float("nan")])
    assert isinstance(found[0], float)
    assert found[0] != found[0]


# ---- NumPy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
     "complex64", "complex128", ">i4", ">f8", "datetime64[ns]", "timedelta64[s]", "S4", "U3"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_arrive_with_their_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array = (np.arange(count) % 2).astype("i8").astype(dtype).reshape(shape)
    found = sent(array)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "view",
    [lambda array: array.T, lambda array: array[:, ::2], lambda array: array[::-1], np.asfortranarray],
    ids=["transposed", "strided", "reversed", "fortran"],
)
def test_views_arrive_by_their_content(view: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    array = view(np.arange(12.0).reshape(3, 4))
    assert np.array_equal(sent(array), array)


def test_an_array_that_arrived_can_be_written_to_and_is_nobody_elses() -> None:
    array = np.arange(4)
    found = sent(array)
    found += 1
    assert array.tolist() == [0, 1, 2, 3]
    assert found.tolist() == [1, 2, 3, 4]


def test_arrays_arrive_inside_of_containers() -> None:
    found = sent({"batch": (np.arange(3), [np.zeros((0, 2), "f4")]), "name": "x"})
    assert isinstance(found["batch"], tuple)
    assert found["batch"][0].tolist() == [0, 1, 2]
    assert (found["batch"][1][0].shape, found["batch"][1][0].dtype) == ((0, 2), np.dtype("f4"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.int8(-3), -3), (np.uint64((1 << 64) - 1), (1 << 64) - 1),
        (np.bool_(True), True), (np.str_("a"), "a"), (np.bytes_(b"a"), b"a"),
    ],
)  # fmt: skip
def test_scalars_of_numpy_arrive_as_those_of_python(value: Any, expected: Any) -> None:
    found = sent((value, {"k": value}))
    assert found == (expected, {"k": expected})
    assert type(found[0]) is type(expected)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
              "complex64", "float8_e4m3fn"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_arrive_with_their_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    import torch

    tensor = (torch.arange(int(np.prod(shape))) % 2).to(getattr(torch, dtype)).reshape(shape)
    found = sent(tensor)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.shape, found.device.type) == (tensor.dtype, tensor.shape, "cpu")
    assert torch.equal(found.float(), tensor.float()) if dtype != "complex64" else torch.equal(found, tensor)


def test_views_of_tensors_arrive_by_their_content() -> None:
    import torch

    whole = torch.arange(24.0).reshape(4, 6)
    for view in (whole.t(), whole[:, ::2], whole[1:], whole[0].expand(3, 6), whole[2, 3]):
        assert torch.equal(sent(view), view)


def test_a_tensor_arrives_without_its_gradient_and_can_be_written_to() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.ones(2))
    found = sent({"weight": (parameter * 2, parameter)})["weight"]
    assert [one.requires_grad for one in found] == [False, False]
    found[1].add_(1)
    assert parameter.tolist() == [1, 1]
    assert found[0].tolist() == found[1].tolist() == [2, 2]


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_lazy_view_of_a_complex_tensor_arrives_by_its_content(view: str) -> None:
    import torch

    tensor = torch.tensor([1 + 2j]).conj()
    tensor = tensor if view == "conj" else tensor.imag
    assert torch.equal(sent(tensor), tensor.resolve_conj().resolve_neg())


# ---- refusals --------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    """A value with a type of its own."""

    RED = "red"


@dataclasses.dataclass
class Sample:
    """Data with a type of its own."""

    text: str = "x"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "type object"),
        (Sample, "type type"),
        (len, "type builtin_function_or_method"),
        (ValueError("x"), "type ValueError"),
        (1j, "type complex"),
        (range(3), "type range"),
        (iter([1]), "type list_iterator"),
        (1 << 64, "ints"),
        ("\ud800", "surrogates not allowed"),
        (np.ma.masked_array([1, 2], [True, False]), "type MaskedArray"),
        (np.array([[1, 2]]).view(np.matrix), "type matrix"),
        (np.rec.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), "type recarray"),
        (np.char.asarray(["a"]), "type chararray"),
        (np.array(["text"], np.dtypes.StringDType()), "a NumPy array of Python objects"),
        (np.array([object()], object), "a NumPy array of Python objects"),
        (np.array([1, "x"], object), "a NumPy array of Python objects"),
        (np.zeros(2, [("a", object)]), "a NumPy array of Python objects"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [{"k": (1, value)}]], ids=["itself", "inside"])
def test_other_values_are_refused(value: Any, words: str, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError) as refused:
        call_codec.encode(wrap(value))
    assert words in refused.value.message
    assert "cannot be sent to another worker" in refused.value.message
    assert "lists, tuples, dicts, NumPy arrays and torch tensors" in refused.value.hint


@pytest.mark.parametrize(
    "value",
    [{1, 2}, frozenset([1]), Sample(), Color.RED, Decimal("1.5"), datetime.datetime(2026, 1, 1), np.datetime64(0, "s")],
    ids=lambda value: type(value).__name__,
)
def test_values_that_would_arrive_as_another_type_are_refused(value: Any) -> None:
    """A set would arrive as a list, a dataclass as a dict, an enum, a Decimal and a time as text."""
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        call_codec.encode(value)


def test_a_scalar_that_python_has_no_type_for_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        call_codec.encode(np.longdouble(1))


def test_an_array_with_fields_arrives_with_them_or_is_refused() -> None:
    array = np.array([(1, 0.5)], [("number", "i4"), ("value", "f4")])
    try:
        found = sent(array)
    except UsageError:
        return
    assert found.dtype == array.dtype


def test_a_mapped_file_arrives_as_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=(4,))
    mapped[:] = range(4)
    found = sent(mapped[1:])
    assert type(found) is np.ndarray
    assert found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["sparse", "meta", "derived"])
def test_a_tensor_that_would_not_arrive_as_it_is_is_refused(kind: str) -> None:
    import torch

    class Derived(torch.Tensor):
        """A tensor with a type of its own."""

    tensor: Any = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "meta": lambda: torch.ones(2, device="meta"),
        "derived": lambda: torch.ones(2).as_subclass(Derived),
    }[kind]()
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        call_codec.encode(tensor)


def itself(kind: str) -> Any:
    inner = list[Any]()
    inner.append({"list": inner, "tuple": (inner,), "dict": {"k": inner}}[kind])
    return inner


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_a_value_that_contains_itself_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="a value that contains itself, or is nested too deeply"):
        call_codec.encode(itself(kind))


def test_a_value_that_is_too_large_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(call_codec, "MOST_BYTES", 100)
    assert sent(bytes(90)) == bytes(90)
    for value, words in (
        (bytes(101), "a value of 103 bytes: at most 100 bytes"), ([(bytes(101),)], "a value of 104 bytes"),
        (np.zeros(100), "a NumPy array of 800 bytes"), (torch.zeros(100), "a tensor of 400 bytes"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            call_codec.encode(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", call_codec.encode([1, 2])[:-1], b"\xc7\x00\x63"])
def test_bytes_that_are_no_values_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        call_codec.decode(data)


def test_an_array_of_objects_is_refused_by_the_receiver_too() -> None:
    """Bytes from elsewhere make no Python objects."""
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["|O", [1], b"\x00" * 8])))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        call_codec.decode(forged)
