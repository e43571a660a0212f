"""Any Python state goes through tagged JSON and comes back equal, without pickle."""

from __future__ import annotations

import datetime
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dlrover_hooks.checkpoint.state.pytree import flatten, unflatten
from dlrover_hooks.errors import Corrupt, UnsupportedState

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
    | st.timedeltas()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), pathlib.Path("/a/b")])
)
KEYS = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.sampled_from(["$tuple", "$", "$$x", "a.b", "__metadata__"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.tuples(st.integers(), st.text(max_size=2)), max_size=3)
    ),
    max_leaves=20,
)


def shape(tree: Any) -> Any:
    """`tree` with the type of everything in it, so that 1, 1.0 and True differ."""
    if isinstance(tree, dict):
        return type(tree), [(shape(key), shape(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [shape(item) for item in tree]
    return type(tree), tree


def trip(tree: Any, **options: Any) -> Any:
    flat = flatten(tree, **options)
    return unflatten(flat.skeleton, flat.tensors)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_round_trip(tree: Any) -> None:
    assert shape(trip(tree)) == shape(tree)


def test_floats_that_json_has_not() -> None:
    back = trip([math.inf, -math.inf, math.nan, -0.0])
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1


def test_tensors_are_named_by_path_and_not_copied() -> None:
    moment = torch.ones(2)
    tree = {"optimizer_states": [{"state": {12: {"exp_avg": moment}}}]}
    flat = flatten(tree)
    assert flat.tensors == {"state.optimizer_states.0.state.12.exp_avg": moment}
    assert unflatten(flat.skeleton, flat.tensors)["optimizer_states"][0]["state"][12]["exp_avg"] is moment


def test_names_are_unique_where_paths_collide() -> None:
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    back = trip({"a.b": one, "a": {"b": two}, 1: three, "1": one})
    assert back["a.b"] is one
    assert back["a"]["b"] is two
    assert back[1] is three
    assert back["1"] is one


def test_numpy() -> None:
    tree = {
        "scalar": np.float32(1.5),
        "int": np.int64(3),
        "array": np.arange(6).reshape(2, 3),
        "text": np.array(["a", "bc"]),
        "complex": np.array([1j, 2]),
    }
    flat = flatten(tree)
    assert set(flat.tensors) == {"state.array"}
    back = unflatten(flat.skeleton, {"state.array": torch.from_numpy(tree["array"])})
    for key, value in tree.items():
        assert type(back[key]) is type(value)
        assert back[key].dtype == value.dtype
        assert (back[key] == value).all()


def test_kinds_of_dicts_and_sizes_come_back_as_they_were() -> None:
    tree = {
        "size": torch.Size([2, 3]),
        "default": defaultdict(list, {"a": [1]}),
        "bare": defaultdict(None, {1: 2}),
        "counter": Counter("aab"),
        "wait": datetime.timedelta(seconds=3),
    }
    back = trip(tree)
    assert back == tree
    assert {name: type(one) for name, one in back.items()} == {name: type(one) for name, one in tree.items()}
    assert back["default"]["new"] == []
    assert back["bare"].default_factory is None
    assert back["counter"]["none"] == 0


class Attributes(dict[str, Any]):
    pass


class Rows(list[int]):
    pass


class Name(str):
    pass


@pytest.mark.parametrize(
    ("one", "back"),
    [(Attributes(a=1), {"a": 1}), (Rows([1]), [1]), (Name("n"), "n"), (defaultdict(lambda: 7, {"a": 1}), {"a": 1})],
    ids=["dict", "list", "str", "lambda"],
)
def test_what_comes_back_as_less_than_it_was_is_said_once(
    one: Any, back: Any, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"state-{type(one).__name__}"
    for _ in range(2):
        assert trip({"odd": one}, where=where) == {"odd": back}
    assert caplog.text.count("comes back") == 1
    assert f"{where}.odd is a " in caplog.text


class Odd:
    def __repr__(self) -> str:
        return "Odd()"


def test_unsupported_names_path_type_and_hint() -> None:
    with pytest.raises(UnsupportedState, match=r"state\.callbacks\.Mine\.1 is a .*Odd, .*pickle") as caught:
        flatten({"callbacks": {"Mine": [0, Odd()]}})
    assert caught.value.hint


def test_unsupported_may_be_replaced() -> None:
    seen: list[str] = []

    def as_repr(path: str, value: Any) -> str:
        seen.append(path)
        return repr(value)

    assert trip({"lr": Odd(), "n": 1}, where="hyper", on_unsupported=as_repr) == {"lr": "Odd()", "n": 1}
    assert seen == ["hyper.lr"]
    with pytest.raises(UnsupportedState, match="hyper"):
        flatten(Odd(), where="hyper", on_unsupported=lambda _, value: value)


def test_cycles_and_depth_are_errors_not_hangs() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="contains itself"):
        flatten(loop)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsupportedState, match="deep"):
        flatten(deep)


@pytest.mark.parametrize("skeleton", ["{", '{"$tensor":"gone"}', '{"$what":1}', '{"$bytes":7}', '{"$dict":[1]}'])
def test_damage_is_corrupt(skeleton: str) -> None:
    with pytest.raises(Corrupt):
        unflatten(skeleton.encode(), {})
