"""Exports a durable generation to the formats of other tools, so that uninstalling dlrover-hooks loses nothing.

The files follow the rules of the tools that load them: those of torch, DCP and Lightning are pickles, made and read by
stock tools. dlrover-hooks itself never reads pickles.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.state.pytree import unflatten
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder, reason
from dlrover_hooks.checkpoint.storage.retention import reading
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Images, chosen
from dlrover_hooks.errors import HooksError, MissingExtra, StorageFailed, UsageError
from dlrover_hooks.protocol import Manifest
from dlrover_hooks.protocol.restored_value_check import listed

FILE_BYTES = 5_000_000_000
"""Maximum size of one weights file in a Hugging Face folder, as in `save_pretrained`."""


def load(url: str, options: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The replicated parts `state` and `data` of `manifest`'s generation, with full tensors assembled from all ranks.

    Raises:
        Corrupt: data does not match its hash; names file, chunk and generation.
        StorageFailed: it cannot be read.
    """
    place = StorageFolder(url, options)
    images = Images(manifest.generation, manifest.world_size, lambda rank: StoredImage(place, manifest, rank))
    with reading(place, manifest.generation), contextlib.closing(images):
        index = images.everything()
        skeletons = images.image(0).header.inside().skeletons
        tensors = torch_backend.load(chosen(index, ("state", "data")))
        return {part: unflatten(skeletons[part], tensors) for part in ("state", "data") if part in skeletons}


def export(url: str, options: Mapping[str, Any], manifest: Manifest, form: str, dest: str) -> None:
    """Write `manifest`'s generation to local path `dest` as `form`: torch, dcp, hf or lightning. Atomic.

    Raises:
        UsageError: `dest` cannot be created, or the state has no such form.
        Corrupt, StorageFailed: as `load`; `dest` cannot be written.
    """
    dest = os.path.abspath(dest)
    _refuse_dest(StorageFolder(url, options), dest)
    tree = load(url, options, manifest)
    with _whole(dest) as part:
        _FORMS[form](tree, manifest, part)


def _refuse_dest(place: StorageFolder, dest: str) -> None:
    above = os.path.dirname(dest)
    if os.path.lexists(dest):
        raise UsageError(f"{dest} exists already; nothing is written over", hint="name another place, or remove it")
    if not os.path.isdir(above):
        raise UsageError(f"{dest} cannot be made: there is no folder {above}", hint="make that folder first")
    tree = os.path.realpath(place.root)
    if place.local and os.path.commonpath([tree, os.path.realpath(dest)]) == tree:
        raise UsageError(f"{dest} lies in the checkpoint tree {place.url}", hint="name a place outside of it")


@contextlib.contextmanager
def _whole(dest: str) -> Iterator[str]:
    """A temporary path beside `dest`: renamed to `dest` on success, removed on failure."""
    part = f"{dest}.{os.getpid()}.tmp"
    try:
        yield part
        os.rename(part, dest)
    except HooksError:
        raise
    except Exception as error:  # each writer raises its own errors for a full disk
        hint = "name a place where there is room, and that this user may write"
        raise StorageFailed(f"cannot write {dest}: {reason(error)}", hint=hint) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(part) if os.path.isdir(part) else os.unlink(part)


def _to_torch(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    """Readable by `torch.load` with weights_only=True: other values become their nearest plain value."""
    about = {"job": manifest.job, "data": tree.get("data")}
    about |= {name: getattr(manifest.generation, name) for name in ("run", "attempt", "step")}
    torch.save(_plain(tree["state"] | {"dlrover_hooks": about}), dest)


def _to_dcp(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    del manifest
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():  # DCP warns that it saves in one process, which is intended
        warnings.simplefilter("ignore", UserWarning)
        save(tree["state"], storage_writer=FileSystemWriter(dest), no_dist=True)


def _to_lightning(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    if "lightning" not in tree["state"]:
        raise UsageError(
            f"{manifest.generation} of job {manifest.job!r} was not saved by Lightning: it has no such form",
            hint="--to torch writes the state as it was saved, --to hf the model's weights",
        )
    torch.save(tree["state"]["lightning"], dest)


def _to_hf(tree: dict[str, Any], manifest: Manifest, dest: str) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra("--to hf needs safetensors", hint="pip install dlrover-hooks[torch]") from error
    weights = _apart(_model(tree["state"], manifest))
    _refuse_unknown(weights)
    shares = _shares(weights)
    os.makedirs(dest)
    names = [f"model-{i + 1:05d}-of-{len(shares):05d}.safetensors" for i in range(len(shares))]
    names = names if len(shares) > 1 else ["model.safetensors"]
    for name, share in zip(names, shares, strict=True):
        path = os.path.join(dest, name)
        with open(path, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode  # follows the umask; safetensors would make it private
        save_file(share, path, metadata={"format": "pt"})
        os.chmod(path, stat.S_IMODE(mode))
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


def _model(state: dict[str, Any], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's state_dict, at any adapter's location. Raises UsageError if there is not exactly one model."""
    models = [state["model"]] if "model" in state else state.get("parts", {}).get("model", [])
    models = [state["lightning"]["state_dict"]] if "lightning" in state else models
    if len(models) != 1:
        raise UsageError(
            f"{manifest.generation} of job {manifest.job!r} holds {len(models)} models, not one",
            hint="--to torch writes the state as it was saved",
        )
    return {name: one for name, one in models[0].items() if isinstance(one, torch.Tensor)}


def _apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tied weights for each name: safetensors does not support ties, and some loaders need every name."""
    seen: set[int] = set()
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        tied = tensor.nbytes > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        apart[name] = tensor.clone() if tied else tensor.contiguous()
    return apart


def _refuse_unknown(weights: dict[str, torch.Tensor]) -> None:
    """Raises UsageError for dtypes that safetensors lacks."""
    unknown = [
        f"{name} ({one.dtype})" for name, one in weights.items() if one.dtype not in torch_backend.DTYPES.values()
    ]
    if unknown:
        raise UsageError(
            f"the safetensors format has no such dtype: {listed(unknown)}",
            hint="--to torch and --to dcp write them as they are",
        )


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
    """`value` converted to types that `torch.load` allows with weights_only=True."""
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
