"""Settings: keyword arguments over environment over defaults. This is the only reader of the environment.

Every shared keyword can be given as `DLROVER_HOOKS_<NAME>`. The launcher, torchrun, SLURM and Kubernetes are read here
too, so that identity (job, node, rank) has one source.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, MutableMapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import msgspec

from dlrover_hooks.errors import KeeperAway, Stale, UsageError
from dlrover_hooks.protocol import Retention

PREFIX = "DLROVER_HOOKS_"
Duration = timedelta | str | int
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The shared keywords of every adapter, checked and in canonical units."""

    save_to: str | None = None
    storage_options: dict[str, Any] = {}
    save_every: int | str = "auto"
    persist_every: int | str = "600s"
    keep: int | Retention = 2
    snapshot: str = "auto"
    resume: str = "auto"
    job: str = ""
    named: bool = False
    """False: `job` was made up for this start, so no later start can find it."""
    global_batch_size: int | None = None
    master: str | None = None
    token: str | None = None
    on_error: str = "raise"
    replicas: int = 0
    """1: each node's keeper also holds the images of another node, in another failure domain if there is one."""
    replica_mb_per_s: int = 0
    disable: bool = False
    fresh: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = ""
    domain: str = ""
    """The node's failure domain: a rack, a zone."""
    incarnation: str = ""
    """Set by `dlrover-hooks run`, which has already joined for this seat; empty: this process joins for itself."""


def interval(value: Duration, *, name: str) -> int | str:
    """`value` as optimizer steps (int), `"auto"`, or canonical seconds (`"90s"`). Raises `UsageError` with examples."""
    if isinstance(value, bool) or value is None:
        raise _bad_interval(name, value)
    if isinstance(value, timedelta):
        return _seconds(value.total_seconds(), name, value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
        if int(value) < 1:
            raise _bad_interval(name, value)
        return int(value)
    text = str(value).strip().lower()
    if text == "auto":
        return text
    match = re.fullmatch(r"([0-9.]+)\s*(ms|s|m|h|d)", text)
    if match is None:
        raise _bad_interval(name, value)
    return _seconds(float(match[1]) * _UNITS[match[2]], name, value)


def _seconds(seconds: float, name: str, value: object) -> str:
    if seconds <= 0:
        raise _bad_interval(name, value)
    return f"{seconds:g}s"


def _bad_interval(name: str, value: object) -> UsageError:
    return UsageError(
        f"{name}={value!r} is neither a number of optimizer steps nor a duration",
        hint=f'use an int >= 1 for steps ({name}=50), "auto", or a duration such as "90s", "10m" or '
        "timedelta(minutes=10)",
    )


def retention(value: Any, *, name: str = "keep") -> int | Retention:
    """`value` (`2`, `"last=2,every_steps=1000,every=1h"`, the same as a dict, a `Retention`) in canonical form.

    A plain number where that says it all. Raises `UsageError` with examples.
    """
    try:
        rules = msgspec.convert(_rules(value), Retention, strict=False)
        every = interval(rules.every, name="every") if rules.every is not None else None
    except (msgspec.ValidationError, ValueError, UsageError):
        raise _bad_retention(name, value) from None
    if rules.every_steps is None and every is None:
        return rules.last
    if isinstance(every, int) or every == "auto" or (rules.every_steps is not None and rules.every_steps < 1):
        raise _bad_retention(name, value)
    return Retention(rules.last, rules.every_steps, every)


def _rules(value: Any) -> dict[str, Any]:
    """What was given, by rule. Raises ValueError."""
    if isinstance(value, str) and "=" in value:
        pairs = [part.split("=", 1) for part in value.split(",")]
        value = {name.strip(): text.strip() for name, text in pairs}
    elif isinstance(value, Retention):
        value = {"last": value.last, "every_steps": value.every_steps, "every": value.every}
    elif not isinstance(value, Mapping):
        value = {"last": value}
    if not set(value) <= {"last", "every_steps", "every"} or any(isinstance(one, bool) for one in value.values()):
        raise ValueError
    every = value.get("every")
    return dict(value) | ({"every": f"{every.total_seconds()}s"} if isinstance(every, timedelta) else {})


def _bad_retention(name: str, value: object) -> UsageError:
    return UsageError(
        f"{name}={value!r} does not say what to keep",
        hint="use a whole number for the newest so many (keep=2), or rules of which any may keep a checkpoint: "
        'keep="last=2,every_steps=1000,every=1h", or Retention(last=2, every_steps=1000, every="1h")',
    )


def load(environ: Mapping[str, str] | None = None, **given: Any) -> Config:
    """A `Config` from keyword arguments (None means not given), the environment, and defaults.

    Raises:
        UsageError: a keyword that is none, a value of the wrong type or meaning, or another job than the launcher's.
    """
    _refuse_unknown(given)
    env = os.environ if environ is None else environ
    if environ is None and _launched(env):
        tell_launcher()
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Config):
        if given.get(field.name) is not None:
            values[field.name] = _typed(field.name, given[field.name], field.type)
        elif (text := env.get(PREFIX + field.name.upper())) not in (None, ""):
            values[field.name] = _parsed(field.name, text, field.type)
    for name in ("save_every", "persist_every"):
        if name in values:
            values[name] = interval(values[name], name=name)
    if "keep" in values:
        values["keep"] = retention(values["keep"])
    job = values.get("job") or _job(env)
    if _launched(env) and job != _job(env):
        raise UsageError(
            f"job={job!r}, but the launcher runs job {_job(env)!r}: its master knows no other",
            hint=f"give the launcher --job {job}, or leave job= out",
        )
    values |= {"job": job or f"job-{uuid.uuid4().hex[:12]}", "named": job is not None}
    config = Config(**values)
    _check(config)
    return config


def _refuse_unknown(given: Iterable[str]) -> None:
    known = [field.name for field in msgspec.structs.fields(Config) if field.name != "named"]
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        raise UsageError(
            f"there is no keyword {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}",
        )


def _launched(env: Mapping[str, str]) -> bool:
    """`dlrover-hooks run` has started this process, and its seat is not used yet."""
    return bool(env.get(PREFIX + "INCARNATION") and env.get(PREFIX + "JOB"))


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A keyword's value; paths become text, intervals and retention are looked at later."""
    if name in ("save_every", "persist_every", "keep"):
        return value
    if isinstance(value, os.PathLike):  # a path to resume from is never one of the words
        value = os.path.abspath(value) if name == "resume" else os.fspath(value)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}={value!r} cannot be used: {error}", hint=f"give {name} {_WANTED[name]}") from None


_WANTED = {
    "save_to": "a folder (str or Path) or an fsspec URL",
    "storage_options": "a dict of fsspec options",
    "snapshot": '"auto", "eager" or "lazy"',
    "resume": '"auto", "never", "require", a folder or a URL',
    "job": "a name (str)",
    "global_batch_size": "a whole number of samples",
    "master": 'an address such as "http://127.0.0.1:8780"',
    "token": "a text (str)",
    "on_error": '"raise" or "warn"',
    "replicas": "0 or 1",
    "replica_mb_per_s": "a whole number of millions of bytes per second, 0 for no limit",
    "disable": "True or False",
    "fresh": "True or False",
}


def tell_launcher() -> None:
    """Let the exit code of this worker say what only it knows: 78, a setting must be mended, so a restart is in vain;
    75, the master has declared it dead by mistake, so a restart is right. Tracebacks are printed as ever."""
    if isinstance(sys.excepthook, _LastWords):
        return
    sys.excepthook = _LastWords(sys.excepthook)


class _LastWords:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if isinstance(error, (UsageError, Stale)):
            raise SystemExit(78 if isinstance(error, UsageError) else 75)


def _parsed(name: str, text: str, kind: Any) -> Any:
    if name == "keep":
        return retention(text, name=f"{PREFIX}KEEP")
    try:
        return msgspec.json.decode(text) if name == "storage_options" else msgspec.convert(text, kind, strict=False)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{PREFIX}{name.upper()}={text!r} cannot be read: {error}") from error


def _check(config: Config) -> None:
    if (config.keep if isinstance(config.keep, int) else config.keep.last) < 1:
        raise UsageError(f"keep={config.keep} would leave no checkpoint", hint="keep the last 1 or more")
    if config.replicas not in (0, 1) or config.replica_mb_per_s < 0:
        raise UsageError(
            f"replicas={config.replicas}, replica_mb_per_s={config.replica_mb_per_s} cannot be done",
            hint="replicas=1 keeps one replica of each node on another one; replica_mb_per_s=0 sets no limit",
        )
    if config.on_error not in ("raise", "warn"):
        raise UsageError(f"on_error={config.on_error!r} is unknown", hint='use "raise" or "warn"')
    if config.snapshot not in ("auto", "eager", "lazy"):
        raise UsageError(f"snapshot={config.snapshot!r} is unknown", hint='use "auto", "eager" or "lazy"')
    if config.global_batch_size is not None and config.global_batch_size < 1:
        raise UsageError(f"global_batch_size={config.global_batch_size} must be at least 1")
    folder = "/" in config.resume or config.resume.startswith("weights:")
    if config.resume not in ("auto", "never", "require", "weights") and not folder:
        raise UsageError(
            f"resume={config.resume!r} is unknown",
            hint='use "auto", "never", "require", "weights", a URL, or "weights:URL"',
        )


def _job(env: Mapping[str, str]) -> str | None:
    """The job's name as a launcher gave it: ours, torchrun's (not its default "none"), SLURM's, Kubernetes'."""
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOB_NAME"):
        if (value := env.get(name)) and value != "none":
            return value
    return None


def place(environ: Mapping[str, str] | None = None, *, rank: int | None = None, world_size: int | None = None) -> Place:
    """This process's place; `rank` and `world_size` given by a framework win over the environment."""
    env = os.environ if environ is None else environ
    return Place(
        rank=int(env.get("RANK", 0)) if rank is None else rank,
        world_size=int(env.get("WORLD_SIZE", 1)) if world_size is None else world_size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        node=env.get(PREFIX + "NODE") or socket.gethostname(),
        domain=env.get(PREFIX + "DOMAIN", ""),
        incarnation=env.get(PREFIX + "INCARNATION", ""),
    )


def use_seat(environ: MutableMapping[str, str] | None = None) -> None:
    """Forget the launcher's seat: it serves one session; a second `fit` in the same process joins for itself."""
    (os.environ if environ is None else environ).pop(PREFIX + "INCARNATION", None)


def worker_environment(**values: str) -> dict[str, str]:
    """This process's environment for a child, with `values` set and one thread per worker unless the user chose."""
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | values


def runtime_dir() -> str:
    """A folder of this user alone (mode 0700) for sockets and locks, made if need be.

    Raises:
        KeeperAway: somebody else owns that name.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid():
        path = os.path.join(base, "dlrover-hooks")
    else:
        path = os.path.join(tempfile.gettempdir(), f"dlrover-hooks-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise KeeperAway(
            f"{path} is not this user's own folder with mode 0700", hint="remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def global_seed() -> int:
    """Lightning's `seed_everything` leaves its seed here; 0 as Lightning itself does."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
