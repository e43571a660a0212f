"""A durable generation in the forms of other tools, so that uninstalling dlrover-hooks loses nothing (DL-91).

What is written is for their loaders and goes by their rules: torch's, DCP's and Lightning's files are pickles that
stock tools make and read. Nothing of ours is ever read that way.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dlrover_hooks.checkpoint import snapshot
from dlrover_hooks.checkpoint.images import Images, chosen
from dlrover_hooks.checkpoint.place import Place
from dlrover_hooks.checkpoint.retention import reading
from dlrover_hooks.checkpoint.stored import StoredImage
from dlrover_hooks.checkpoint.tree import unflatten
from dlrover_hooks.errors import MissingExtra, UsageError
from dlrover_hooks.protocol import Manifest

FILE_BYTES = 5_000_000_000
"""A Hugging Face folder's weights are cut into files of at most so much, as `save_pretrained` does."""


def load(url: str, options: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The replicated parts `state` and `data` of `manifest`'s generation: whole tensors, whoever held their shards.

    Raises:
        Corrupt: something does not match its hash; names file, chunk and generation.
        StorageFailed: it cannot be read.
    """
    place = Place(url, options)
    images = Images(manifest.generation, manifest.world_size, lambda rank: StoredImage(place, manifest, rank))
    with reading(place, manifest.generation), contextlib.closing(images):
        index = images.everything()
        skeletons = images.image(0).header.inside().skeletons
        tensors = snapshot.load(chosen(index, ("state", "data")))
        return {part: unflatten(skeletons[part], tensors) for part in ("state", "data") if part in skeletons}


def export(url: str, options: Mapping[str, Any], manifest: Manifest, form: str, dest: str) -> None:
    """Write `manifest`'s generation to local path `dest` as `form`: torch, dcp, hf or lightning.

    Raises:
        UsageError: `dest` exists, or the state has no such form.
        Corrupt, StorageFailed: as `load`.
    """
    if os.path.lexists(dest):
        raise UsageError(f"{dest} exists already; nothing is written over", hint="name another place, or remove it")
    _FORMS[form](load(url, options, manifest), manifest, dest)


def _to_torch(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    """As `torch.load` reads it with weights_only=True: what that refuses becomes its nearest plain value."""
    about = {"job": manifest.job, "data": tree.get("data")}
    about |= {name: getattr(manifest.generation, name) for name in ("run", "attempt", "step")}
    _save(_plain(tree["state"] | {"dlrover_hooks": about}), dest)


def _to_dcp(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    del manifest
    from torch.distributed import checkpoint as dcp

    dcp.save(tree["state"], storage_writer=dcp.FileSystemWriter(dest), no_dist=True)


def _to_lightning(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    if "lightning" not in tree["state"]:
        raise UsageError(
            f"{manifest.generation} of job {manifest.job!r} was not saved by Lightning: it has no such form",
            hint="--to torch writes the state as it was saved, --to hf the model's weights",
        )
    _save(tree["state"]["lightning"], dest)


def _to_hf(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra("--to hf needs safetensors", hint="pip install dlrover-hooks[torch]") from error
    weights = _apart(_model(tree["state"], manifest))
    shares = _shares(weights)
    os.makedirs(dest)
    names = [f"model-{i + 1:05d}-of-{len(shares):05d}.safetensors" for i in range(len(shares))]
    names = names if len(shares) > 1 else ["model.safetensors"]
    for name, share in zip(names, shares, strict=True):
        save_file(share, os.path.join(dest, name), metadata={"format": "pt"})
    if len(shares) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        where = {key: name for name, share in zip(names, shares, strict=True) for key in share}
        with open(os.path.join(dest, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": where}, file, indent=2)


_FORMS: dict[str, Callable[[dict[str, Any], Manifest, str], None]] = {
    "torch": _to_torch,
    "dcp": _to_dcp,
    "hf": _to_hf,
    "lightning": _to_lightning,
}


def _save(what: Any, dest: str) -> None:
    """Whole or not at all."""
    part = f"{dest}.{os.getpid()}.tmp"
    try:
        torch.save(what, part)
        os.replace(part, dest)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _model(state: dict[str, Any], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's state_dict, wherever the adapter that saved it puts it. Raises UsageError if there is not one."""
    models = [state["model"]] if "model" in state else state.get("parts", {}).get("model", [])
    models = [state["lightning"]["state_dict"]] if "lightning" in state else models
    if len(models) != 1:
        raise UsageError(
            f"{manifest.generation} of job {manifest.job!r} holds {len(models)} models, not one",
            hint="--to torch writes the state as it was saved",
        )
    return {name: one for name, one in models[0].items() if isinstance(one, torch.Tensor)}


def _apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights under each of their names: safetensors knows no ties, and some loaders want every name."""
    seen: set[int] = set()
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        tied = tensor.nbytes > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        apart[name] = tensor.clone() if tied else tensor.contiguous()
    return apart


def _shares(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shares: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        if shares[-1] and filled + tensor.nbytes > FILE_BYTES:
            shares.append({})
            filled = 0
        shares[-1][name] = tensor
        filled += tensor.nbytes
    return shares


def _plain(value: Any) -> Any:
    """`value` out of what `torch.load` allows with weights_only=True."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.isnative and value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return type(value)((_plain(key), _plain(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_plain(one) for one in value)
    if isinstance(value, (set, frozenset)):
        return {_plain(one) for one in value}
    return value
