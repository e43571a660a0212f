"""A save looks no closer than it must, and what has changed is noticed all the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dlrover_hooks.checkpoint.save.slot_writer import Changed, SlotSave, SlotTarget, Writer
from dlrover_hooks.checkpoint.state.safetensors_header import Inside, parse
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout
from dlrover_hooks.errors import UnsupportedState
from dlrover_hooks.protocol import Generation


@pytest.fixture(autouse=True, params=["C", "Python"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Forms are told in one pass by the C helper; in Python one by one, behind the copy."""
    if request.param == "Python":
        monkeypatch.setattr(torch_backend, "_look", None)
    return torch_backend._look is not None and torch_backend._EXCHANGE is not None


def _tensors() -> dict[str, Any]:
    weights = {f"weight.{index}": torch.full((8, 4), float(index)) for index in range(6)}
    return weights | {"random": torch.zeros(5), "numpy": np.zeros(7), "none": torch.empty(0, 3)}


def _settled(recipe: CachedLayout, tensors: dict[str, Any]) -> bool:
    """As a save does it. Where they are found is where they lie."""
    found = recipe.settled(tensors)
    if found is None:
        assert recipe.fits(tensors)
        found = recipe.sources(tensors)
        settled = False
    else:
        assert recipe.holds(tensors)
        settled = True
    lie = [one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data for one in tensors.values()]
    assert found.addresses.tolist() == [
        address for address, one in zip(lie, tensors.values(), strict=True) if one.nbytes
    ]
    return settled


def test_states_that_are_made_anew_do_not_unsettle_the_others() -> None:
    """A session's saves: the model lies still, random generators' states are others each time."""
    tensors = _tensors()
    recipe, kept = CachedLayout(tensors), []
    settled = []
    for _ in range(5):
        kept.append(tensors)  # else the next ones may lie where these lay
        settled.append(_settled(recipe, tensors))
        tensors = tensors | {"random": torch.ones(5), "numpy": np.ones(7)}
    assert settled == [False, False, True, True, True]


def test_a_model_that_moves_settles_again() -> None:
    first, second = _tensors(), _tensors()
    recipe = CachedLayout(first)
    assert [_settled(recipe, one) for one in (first, first, second, second, first)] == [False, True, False, True, False]


def test_another_form_is_noticed_wherever_it_is() -> None:
    tensors = _tensors()
    recipe = CachedLayout(tensors)
    for _ in range(3):
        _settled(recipe, tensors)
    for name, other in (
        ("weight.1", torch.zeros(4, 8)),
        ("weight.1", tensors["weight.1"].T),
        ("weight.1", tensors["weight.1"].view(4, 8)),
        ("weight.1", tensors["weight.1"].view(torch.int32)),
        ("weight.1", tensors["weight.1"][:7]),
        ("weight.1", tensors["weight.1"].double()),
        ("numpy", np.zeros(8)),
        ("numpy", np.zeros(7, np.int64)),
        ("none", torch.empty(0, 4)),
    ):
        changed = tensors | {name: other}
        assert recipe.settled(changed) is None or not recipe.holds(changed), (name, other)
        _settled(recipe, tensors)


def test_a_tensor_that_begins_to_wander_no_longer_unsettles_the_others() -> None:
    tensors = _tensors()
    recipe, kept, settled = CachedLayout(tensors), [], []
    for _ in range(6):
        kept.append(tensors)
        settled.append(_settled(recipe, tensors))
        tensors = tensors | {"weight.2": torch.zeros(8, 4)}
    assert settled[2:] == [True] * 4


@pytest.mark.parametrize("name", ["weight.1", "view"])
def test_a_tensor_that_gives_up_its_memory_is_named(name: str) -> None:
    """At rest or not, at the first save after that or later: never a read from address 0."""
    tensors = _tensors() | {"view": torch.zeros(8, 4).T}
    recipe = CachedLayout(tensors)
    recipe.sources(tensors)
    tensors[name].untyped_storage().resize_(0)
    for find in (recipe.settled, recipe.sources, recipe.settled, recipe.sources):
        with contextlib.suppress(UnsupportedState):
            assert find(tensors) is None
    with pytest.raises(UnsupportedState, match=name):
        recipe.sources(tensors)


_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda one: one.resize_(4, 9),
    "fewer elements": lambda one: one.resize_(5, 6),
    "turned": lambda one: one.t_(),
    "another type": lambda one: setattr(one, "data", one.data.view(torch.int32)),
    "not side by side": lambda one: one.set_(one.untyped_storage(), 0, (3, 6), (12, 1)),
    "moved": lambda one: setattr(one, "data", torch.zeros(6, 6)),
    "one more dimension": lambda one: one.unsqueeze_(0),
}


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_tensor_that_is_changed_where_it_is(change: str, kind: type[torch.Tensor], told: bool) -> None:
    """The same object of the same name: found ahead of a copy where forms are told, else before one counts."""
    tensors = _tensors() | {"square": torch.ones(6, 6)}
    if kind is torch.nn.Parameter:
        tensors["square"] = torch.nn.Parameter(tensors["square"], requires_grad=False)
    recipe = CachedLayout(tensors)
    assert [_settled(recipe, tensors) for _ in range(2)] == [False, True]
    _CHANGES[change](tensors["square"])
    early = recipe.settled(tensors) is None
    assert early or not recipe.holds(tensors)
    assert early or not (told or change == "fewer elements")  # a copy must not read more than there is


def test_a_single_element_that_is_to_be_negated_is_noticed() -> None:
    """It lies where it lay, in the same form, and reads as something else."""
    whole = torch.full((1,), 1 + 2j)
    tensors = _tensors() | {"imaginary": whole.imag}
    recipe = CachedLayout(tensors)
    assert [_settled(recipe, tensors) for _ in range(2)] == [False, True]
    turned = tensors | {"imaginary": whole.conj().imag}
    assert turned["imaginary"].data_ptr() == tensors["imaginary"].data_ptr()
    assert recipe.settled(turned) is None or not recipe.holds(turned)
    found = recipe.sources(turned)
    assert found.held[-1].tolist() == [-2.0]
    assert found.addresses[-1] != turned["imaginary"].data_ptr()


def test_what_lies_elsewhere_for_once_is_not_read_there_again() -> None:
    """A save that failed, because something had given up its memory, leaves nothing behind."""
    tensors = _tensors()
    recipe = CachedLayout(tensors)
    assert [_settled(recipe, tensors) for _ in range(2)] == [False, True]
    gone = torch.zeros(8, 4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedState):
        recipe.sources(tensors | {"weight.1": gone})
    _settled(recipe, tensors)


def test_a_header_that_is_too_long_although_its_text_is_not(told: bool) -> None:
    """It is made beside the copy if one of such a length fitted: that save does not count then, the next one does."""
    del told
    tensors, generation = _tensors(), Generation(1, 1, "a" * 32)
    recipe = CachedLayout(tensors)

    def prove(text: str) -> Inside:
        inside = Inside(generation, 0, 1, {"state": msgspec.Raw(json.dumps(text).encode())})
        shot = SlotSave(generation, recipe, recipe.header(inside), recipe.sources(tensors))
        view = memoryview(bytearray(recipe.layout.total_bytes))
        Writer().prove(shot, SlotTarget(1, 0, view, view, lambda _: None))
        return parse(view).inside()

    plain, quotes = "a" * 12_000, '"' * 6_000
    assert bytes(prove(plain).skeletons["state"]) == json.dumps(plain).encode()
    before = recipe.number
    with pytest.raises(Changed):
        prove(quotes)
    assert bytes(prove(quotes).skeletons["state"]) == json.dumps(quotes).encode()
    assert recipe.number != before
    assert bytes(prove(plain).skeletons["state"]) == json.dumps(plain).encode()
