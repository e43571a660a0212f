"""Settings: keyword arguments over environment over defaults. This is the only reader of the environment.

Every shared keyword can be given as `DLROVER_HOOKS_<NAME>`. The variables of the launcher, torchrun, SLURM and
Kubernetes are read here too, so that identity (job, node, rank) has one source.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import math
import os
import signal
import socket
import stat
import sys
import tempfile
import traceback
import uuid
import zlib
from collections.abc import Callable, Generator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, cast

import msgspec

from dlrover_hooks.config.duration import interval, retention, seconds
from dlrover_hooks.config.spelling import refuse_unknown, warn_of_unknown
from dlrover_hooks.config.validation import WANTED, check
from dlrover_hooks.errors import KeeperAway, RoundEnded, Stale, UnknownJob, UsageError
from dlrover_hooks.protocol import AGAIN, NodeType, Retention, Shares, StallPolicy, StragglerPolicy
from dlrover_hooks.protocol.base_messages import Rank

PREFIX = "DLROVER_HOOKS_"
LAST_WORDS = PREFIX + "LAST_WORDS"
"""The pipe for a worker's final error: its descriptor and inode, see `launcher.processes.worker_errors`."""
STACK_SIGNAL = signal.SIGRTMIN + 6
"""With this signal the launcher asks a silent worker for its stacks, before it kills the worker. C code writes them to
the same pipe, so the worker need not get the GIL."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The shared keywords of every adapter, checked and in canonical units."""

    save_to: str | None = None
    """Folder or fsspec URL of the durable checkpoints. None: they are kept in memory only."""
    storage_options: dict[str, Any] = {}
    """fsspec options of `save_to`. The journal of the master holds them: put no secrets into them."""
    save_every: int | str = "auto"
    """Interval of snapshots into memory: optimizer steps, or a duration such as `"90s"`. `"auto"`: as often as costs at
    most 3.5 % of the step time, and at most each 0.5 s."""
    persist_every: int | str = "600s"
    """Interval of durable copies: optimizer steps, or a duration. The default is ten minutes. With a duration, the
    first copy of a run is made a minute after its first save."""
    keep: int | Retention = 2
    """Durable generations to keep: the newest so many, or rules such as `"last=2,every_steps=1000,every=1h"`."""
    snapshot: str = "auto"
    """How a snapshot is copied: `"eager"` at once, `"lazy"` during the next forward and backward, `"auto"` by whichever
    was measured to cost less."""
    resume: str = "auto"
    """`"auto"`: the newest complete generation of this job, if there is one. `"never"`: none. `"require"`: refuse to
    begin at step 0. A URL or folder: the newest run there, of any job. `"weights"` or `"weights:URL"`: the model."""
    job: str = ""
    """Name of the job, under which a later start finds its checkpoints. By default that of launcher, torchrun or SLURM;
    if there is none, a new name for each start."""
    named: bool = False
    """False: `job` was generated for this start, so no later start can find it."""
    global_batch_size: int | None = None
    """Samples of an optimizer step over all ranks. None: as at the first start, the batch size times the world size."""
    master: str | None = None
    """Address of the master, such as `http://127.0.0.1:8780`; of several masters all, separated by commas. None: the
    launcher's; without a launcher one worker needs none."""
    token: str | None = None
    """The master's bearer token. None: none is sent."""
    on_error: str = "raise"
    """When storage fails: `"raise"` stops the run at its next step, `"warn"` logs it once and trains on."""
    replicas: int = 0
    """1: each node's keeper also holds the images of another node, in another failure domain if there is one."""
    replica_mb_per_s: int = 0
    """Limit for replication in millions of bytes per second. 0: no limit."""
    disable: bool = False
    """True: every hook does nothing."""
    fresh: bool = False
    """True: start a new run even if there is something to resume."""
    preempt_signals: str = "SIGTERM,SIGUSR1"
    """Signals that announce that this worker will be removed: names with commas between them, or `"none"`."""
    grace: str = "25s"
    """Time from the first such signal until the worker is killed: a duration, or seconds. `dlrover-hooks run` sets it
    to its `--grace`."""

    step_timeout: str = "auto"
    """Time without a step after which the log says where this worker is: a duration, `"auto"` (learned: five times the
    longest pause between two steps, at least a minute), or `"none"`."""
    on_stall: str = "dump"
    """What to do when no rank has made a step for that time: `"warn"` logs one line for each rank, `"dump"` adds the
    stacks, `"restart-rank"` also replaces the rank that the others wait for, `"restart-round"` restarts all ranks."""
    on_straggler: str = "report"
    """What to do when this rank is slow and the others wait for it: `"report"` logs it, `"rebalance"` also gives it
    fewer of the micro-batches of each step and the others more, `"relaunch"` also starts a new process for it,
    `"exclude"` also takes its node out of the job, if enough workers remain."""

    @property
    def signals(self) -> list[str]:
        """`preempt_signals` as a list."""
        names = self.preempt_signals.upper().replace(" ", "").split(",")
        return [name for name in names if name not in ("", "NONE")]

    @property
    def grace_s(self) -> float:
        """`grace` in seconds."""
        return float(self.grace.removesuffix("s"))

    @property
    def step_timeout_s(self) -> float | None:
        """`step_timeout` in seconds; None: learned, infinity: none."""
        if self.step_timeout == "auto":
            return None
        return math.inf if self.step_timeout == "none" else float(self.step_timeout.removesuffix("s"))

    @property
    def stall_policy(self) -> StallPolicy:
        """What the master is asked to restart."""
        restarts = {"restart-rank": StallPolicy.RANK, "restart-round": StallPolicy.ROUND}
        return restarts.get(self.on_stall, StallPolicy.NONE)

    @property
    def straggler_policy(self) -> StragglerPolicy:
        """`on_straggler` for the master."""
        return StragglerPolicy(self.on_straggler)

    @property
    def linger_s(self) -> float:
        """How long a keeper without a launcher waits for a new trainer after its last one; 0 for an unnamed job."""
        return 600.0 if self.named else 0.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Rank, node and launcher of this process within its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = ""
    domain: str = ""
    """The node's failure domain: a rack, a zone."""
    incarnation: str = ""
    """Set by `dlrover-hooks run`, which has already joined for this rank; empty: this process joins for itself."""
    launcher: str = ""
    """Incarnation of the launcher that reaps this process; empty: not started by a dlrover-hooks launcher."""
    host: str = ""
    """Address at which other nodes reach this one, for the process group's store."""
    min_workers: int = 0
    """Of the job, from its launcher; 0 without a dlrover-hooks launcher, like the next two."""
    max_workers: int = 0
    local_world_size: int = 0
    master_away_s: float = 120.0
    """A master that has not answered for this long is treated as gone."""
    keeper_linger_s: float | None = None
    """This process starts its keeper itself, which then waits so long for the next trainer; None: the launcher does."""
    round: int = 0
    """The round in which the rank was assigned; 0: none assigned yet."""
    shares: Shares | None = None
    """How the ranks of this round share the micro-batches of a step; None: evenly."""


def load(environ: Mapping[str, str] | None = None, **given: Any) -> Config:
    """A `Config` from keyword arguments (None means not given), the environment, and defaults.

    Raises:
        UsageError: an unknown keyword, a value of the wrong type or meaning, or a job other than the launcher's.
    """
    refuse_unknown(given, _KEYWORDS)
    env = os.environ if environ is None else environ
    if environ is None and _launched(env):
        tell_launcher()
    warn_of_unknown(env, PREFIX, _VARIABLES)
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    if home := env.get(PREFIX + "REHEARSAL"):
        given = {name: value for name, value in given.items() if name not in ("job", "master", "token")}
    for field in msgspec.structs.fields(Config):
        if given.get(field.name) is not None:
            values[field.name] = _typed(field.name, given[field.name], field.type)
        elif (text := env.get(variable := PREFIX + field.name.upper())) not in (None, ""):
            values[field.name] = _parsed(field.name, text, field.type)
            said[field.name] = variable
    for name in ("save_every", "persist_every"):
        if name in values:
            values[name] = interval(values[name], name=said.get(name, name))
    if "grace" in values:
        values["grace"] = f"{seconds(values['grace'], name=said.get('grace', 'grace')):g}s"
    if values.get("step_timeout", "auto") not in ("auto", "none"):
        name = said.get("step_timeout", "step_timeout")
        values["step_timeout"] = f"{seconds(values['step_timeout'], name=name):g}s"
    if "keep" in values:
        values["keep"] = retention(values["keep"], name=said.get("keep", "keep"))
    if home:
        _keep_apart(values, home)
    if values.get("master"):
        values["master"] = _addresses(values["master"], said.get("master", "master"))
    job = values.get("job") or _job(env)
    if _launched(env) and job != _job(env):
        raise UsageError(
            f"{said.get('job', 'job')}={job!r}, but the launcher runs job {_job(env)!r}: its master keeps no other",
            hint=f"give the launcher --job {job}, or leave job= out",
        )
    values |= {"job": job or f"job-{uuid.uuid4().hex[:12]}", "named": job is not None}
    config = Config(**values)
    check(config, said)
    return config


def _addresses(text: str, name: str) -> str:
    """The URLs of all masters, separated by commas. Raises UsageError."""
    several = [one for part in text.split(",") if (one := part.strip())]
    if not several:
        raise UsageError(
            f"{name}={text!r} names no master",
            hint="such as http://127.0.0.1:8780; of several masters all addresses, separated by commas",
        )
    return ",".join(one if "://" in one else f"http://{one}" for one in several)


def _keep_apart(values: dict[str, Any], home: str) -> None:
    """A rehearsal keeps its checkpoints in `home`, so it never touches those of the job that it rehearses."""
    if values.get("save_to"):
        values["save_to"] = os.path.join(home, f"saved-{zlib.crc32(os.fsencode(values['save_to'])):08x}")
    values |= {"storage_options": {}} | ({"resume": "auto"} if values.get("resume") == "require" else {})


_KEYWORDS = [field.name for field in msgspec.structs.fields(Config) if field.name != "named"]
_LAUNCHERS = (
    *("node", "domain", "incarnation", "runtime_dir", "last_words", "launcher", "host"),
    *(
        "min_workers",
        "max_workers",
        "round",
        "shares",
        "join",
        "preload",
        "master_away_s",
        "task",
        "pod_ip",
        "keeper_linger_s",
    ),
)
_TLS = ("ca_file", "client_cert", "client_key")
_DRILL = ("faults", "trace", "last_step")
_VARIABLES = [PREFIX + name.upper() for name in (*_KEYWORDS, *_LAUNCHERS, *_TLS, *_DRILL, "rehearsal", "plugins")]


def _launched(env: Mapping[str, str]) -> bool:
    """`dlrover-hooks run` started this process, and its rank assignment is unused."""
    return bool(env.get(PREFIX + "INCARNATION") and env.get(PREFIX + "JOB"))


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A keyword's value as its type; paths become text. Intervals and retention are parsed later."""
    if name in ("save_every", "persist_every", "keep", "grace", "step_timeout"):
        return value
    if isinstance(value, os.PathLike):  # a path given to `resume` is never one of its keywords
        path = cast("os.PathLike[str]", value)
        value = os.path.abspath(path) if name == "resume" else os.fspath(path)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}={value!r} cannot be used: {error}", hint=f"give {name} {WANTED[name]}") from None


def tell_launcher() -> None:
    """Install the hook that sets this worker's exit code, from which the launcher decides whether to restart it.

    78: a setting must be corrected, so a restart is useless. AGAIN: the master declared this worker dead by mistake, or
    it cannot survive the end of its round, so a restart helps. Tracebacks are still printed.
    """
    if not _LastWords.installed:  # torch installs its own hook over it in each `init_process_group`
        sys.excepthook, _LastWords.installed = _LastWords(sys.excepthook), True
        if (fd := _error_pipe()) is not None:
            faulthandler.register(STACK_SIGNAL, fd)


class _LastWords:
    installed = False
    """Installed once per process; a second hook would report every error twice."""

    @staticmethod
    def step() -> int:
        """Number of steps that this worker has made; -1: none, or unknown."""
        return -1

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _say_last(kind, error, trace):
            self._before(kind, error, trace)
        if isinstance(error, (UsageError, Stale, UnknownJob, RoundEnded)):
            if sys.excepthook is not self:
                _let_out(sys.stderr)
            raise SystemExit(78 if isinstance(error, UsageError) else AGAIN)


def _let_out(stderr: Any) -> None:
    """Prints output that torch.distributed's hook has buffered to prefix the rank; raising SystemExit would lose it."""
    if isinstance(stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.__stderr__.write(stderr.getvalue())
        sys.__stderr__.flush()


def last_words_to(fd: int, *, prints: bool = False) -> dict[str, str]:
    """The variable that passes descriptor `fd` to a worker. `prints`: the worker also prints all tracebacks."""
    return {LAST_WORDS: f"{fd}:{os.fstat(fd).st_ino}" + (":prints" if prints else "")}


def of_lost_peer(error: BaseException) -> bool:
    """True if a collective failed because a peer was gone, judged by the messages of gloo, NCCL and torch's store."""
    found = error.__class__
    if found.__name__.startswith("Dist") and found.__module__.startswith("torch."):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER)


_LOST_PEER = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer", "NCCL", "ncclRemoteError")
_TRACE_CHARACTERS = 8000
"""A pipe holds 64 KiB, and a character may take six bytes of JSON."""


def step_for_last_words(step: Callable[[], int]) -> None:
    """Set the function that returns the number of steps this worker has made."""
    _LastWords.step = staticmethod(step)


def _say_last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
    """Writes the error to the launcher's pipe.

    True: the traceback went there, too, and is not printed here. The traceback of a worker whose peer is gone would
    hide the first failure on the screen; the launcher prints it if there is no other one.
    """
    fd, prints = _error_pipe(), os.environ.get(LAST_WORDS, "").endswith(":prints")
    echo = not prints and of_lost_peer(error)
    whole = "".join(traceback.format_exception(kind, error, trace))[-_TRACE_CHARACTERS:] if echo else ""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}, {trace.tb_frame.f_code.co_name}" if trace else ""
    text = f"{kind.__name__}: {error}".partition("\n")[0][:1000]
    if fd is None:
        return False
    with contextlib.suppress(OSError):
        said = {"error": text, "where": where[:1000], "trace": whole, "step": _LastWords.step()}
        os.write(fd, msgspec.json.encode(said))
        return echo
    return False


def _error_pipe() -> int | None:
    """The descriptor of the launcher's pipe. The inode check excludes another file of that number, in a grandchild."""
    with contextlib.suppress(OSError, ValueError):
        fd, inode = map(int, os.environ.get(LAST_WORDS, "").split(":")[:2])
        found = os.fstat(fd)
        return fd if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode else None
    return None


def _parsed(name: str, text: str, kind: Any) -> Any:
    if name == "keep":
        return retention(text, name=f"{PREFIX}KEEP")
    try:
        if name == "storage_options":
            return msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.convert(text, kind, strict=False)
    except msgspec.MsgspecError as error:
        wanted = {"storage_options": 'JSON, such as {"anon": true}', "disable": "1 or 0", "fresh": "1 or 0"}
        variable = f"{PREFIX}{name.upper()}"
        hint = f"set {variable} to {wanted.get(name, WANTED.get(name, 'another value'))}, or unset it"
        raise UsageError(f"{variable}={text!r} cannot be read: {error}", hint=hint) from error


def _job(env: Mapping[str, str]) -> str | None:
    """The job's name from a launcher: dlrover-hooks, torchrun (except its default "none"), or SLURM."""
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        if (value := env.get(name)) and value != "none":
            return value
    return None


def place(environ: Mapping[str, str] | None = None, *, rank: int | None = None, world_size: int | None = None) -> Place:
    """This process's place; `rank` and `world_size` given by a framework override the environment."""
    env = os.environ if environ is None else environ
    return Place(
        rank=int(env.get("RANK", 0)) if rank is None else rank,
        world_size=int(env.get("WORLD_SIZE", 1)) if world_size is None else world_size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        node=env.get(PREFIX + "NODE") or socket.gethostname(),
        domain=env.get(PREFIX + "DOMAIN", ""),
        incarnation=env.get(PREFIX + "INCARNATION", ""),
        launcher=env.get(PREFIX + "LAUNCHER", ""),
        host=env.get(PREFIX + "HOST", ""),
        min_workers=int(env.get(PREFIX + "MIN_WORKERS") or 0),
        max_workers=int(env.get(PREFIX + "MAX_WORKERS") or 0),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE") or 0),
        master_away_s=float(env.get(PREFIX + "MASTER_AWAY_S") or 120),
        keeper_linger_s=float(linger) if (linger := env.get(PREFIX + "KEEPER_LINGER_S")) else None,
        round=int(env.get(PREFIX + "ROUND") or 0),
        shares=msgspec.json.decode(told, type=Shares) if (told := env.get(PREFIX + "SHARES")) else None,
    )


class TaskPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process in a parameter server job."""

    type: NodeType
    index: int
    id: int | None = None
    """The master's number of the task; None for a process that `dlrover-hooks run` has not started."""
    address: str = ""
    """`host:port` of its server."""
    ps: int | None = None
    """Parameter servers in TF_CONFIG, None without one."""
    workers: int | None = None


def task(environ: Mapping[str, str] | None = None) -> TaskPlace | None:
    """From `dlrover-hooks run --ps`, else from TF_CONFIG; None if neither is set.

    Raises:
        UsageError: TF_CONFIG is no cluster with a task of it.
    """
    env = os.environ if environ is None else environ
    if own := env.get(PREFIX + "TASK"):
        kind, index, number, address = own.split(":", 3)
        host, _, port = address.rpartition(":")
        if ":" in host and not host.startswith("["):  # an IPv6 address, as Kubernetes gives that of a Pod
            address = f"[{host}]:{port}"
        return TaskPlace(type=NodeType(kind), index=int(index), id=int(number), address=address)
    if not (text := env.get("TF_CONFIG")):
        return None
    try:
        found = msgspec.json.decode(text, type=_TfConfig)
        kind = NodeType(found.task.type)
        address = found.cluster[found.task.type][found.task.index]
    except (msgspec.DecodeError, ValueError, LookupError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be used: {error}",
            hint='such as {"cluster": {"chief": ["a:2222"], "ps": ["b:2222"], "worker": ["c:2222"]}, '
            '"task": {"type": "ps", "index": 0}}',
        ) from None
    sizes = {one: len(found.cluster.get(one.value, ())) for one in NodeType}
    return TaskPlace(
        type=kind, index=found.task.index, address=address, ps=sizes[NodeType.PS], workers=sizes[NodeType.WORKER]
    )


class _TfTask(msgspec.Struct):
    type: str
    index: Rank


class _TfConfig(msgspec.Struct):
    cluster: dict[str, list[str]]
    task: _TfTask


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """Files for a master at `https://`.

    `ca`: a file or folder with the CAs that may sign the master's certificate; empty: the public CAs. `cert`, `key`:
    this process's own certificate; empty `cert`: none; empty `key`: the key is in `cert`.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""


def tls() -> Tls:
    """From `DLROVER_HOOKS_CA_FILE`, `_CLIENT_CERT` and `_CLIENT_KEY`; the CA also from variables of other programs."""
    env = os.environ
    cas = (PREFIX + "CA_FILE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
    return Tls(
        ca=next((env[name] for name in cas if env.get(name)), ""),
        cert=env.get(PREFIX + "CLIENT_CERT", ""),
        key=env.get(PREFIX + "CLIENT_KEY", ""),
    )


def seats_itself() -> bool:
    """A launcher started this process, but the process itself requests its rank from the master."""
    return os.environ.get(PREFIX + "JOIN") == "1"


def use_seat(environ: MutableMapping[str, str] | None = None) -> None:
    """Forget the launcher's rank assignment: it serves one session; a second `fit` in this process joins for itself."""
    (os.environ if environ is None else environ).pop(PREFIX + "INCARNATION", None)


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def slurm_environment() -> dict[str, str]:
    """The SLURM_* variables of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}


def preload_file() -> str | None:
    """The file where the launcher's first worker lists the modules it has imported, for workers started later."""
    return os.environ.get(PREFIX + "PRELOAD") or None


def omp_threads(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS of the outermost level; None if it is not set to a number."""
    text = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(text) if text.isdigit() and int(text) else None


def replace_environment(values: Mapping[str, str]) -> None:
    """Replace this process's environment by `values`."""
    os.environ.clear()
    os.environ.update(values)


def change_environment(values: Mapping[str, str]) -> None:
    """Set `values` in the environment of this process and its future children."""
    os.environ.update(values)


_OF_ONE_WORKER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", PREFIX)
"""Names that begin or end with one of these are set by a launcher and differ between workers."""


@contextlib.contextmanager
def environment_of(values: Mapping[str, str]) -> Generator[dict[str, str]]:
    """Sets `values` within the block. Yields a dict, complete at the end, of other variables set there that remain."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    own, touched, putenv = dict[str, str](), set[str](), os.putenv

    def noted(name: Any, value: Any) -> None:
        touched.add(os.fsdecode(name))
        putenv(name, value)

    os.putenv = noted  # called by os.environ
    try:
        yield own
    finally:
        os.putenv = putenv
        own |= {name: os.environ[name] for name in touched if name in os.environ}  # NumPy removes some it set
        for name, value in before.items():
            if name not in own:
                os.environ.pop(name, None)
                os.environ.update({name: value} if value is not None else {})


def changed_environment() -> dict[str, str]:
    """Variables that this process has set since it was started, except rank and other per-worker ones."""
    with open("/proc/self/environ", "rb") as file:
        began = set(os.fsdecode(file.read()).split("\0"))
    return {
        name: value
        for name, value in os.environ.items()
        if f"{name}={value}" not in began and not name.startswith(_OF_ONE_WORKER) and not name.endswith(_OF_ONE_WORKER)
    }


def worker_environment(**values: str) -> dict[str, str]:
    """This process's environment for a child, with `values` set and OMP_NUM_THREADS=1 unless the user set it."""
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | values


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def tell_workers(master: str, token: str | None) -> None:
    """Pass the address of the master to this process's children (torchrun copies its environment to them)."""
    os.environ[PREFIX + "MASTER"] = master
    if token is not None:
        os.environ[PREFIX + "TOKEN"] = token


def runtime_dir() -> str:
    """A folder of this user alone (mode 0700) for sockets and locks, created if missing.

    Children of a launcher use the launcher's folder: XDG_RUNTIME_DIR may be gone by then (its user logged out).

    Raises:
        KeeperAway: another user owns that folder, or it cannot be created.
    """
    path = os.environ.get(PREFIX + "RUNTIME_DIR") or _own_dir()
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise KeeperAway(f"{path} cannot be made: {error.strerror}", hint="set XDG_RUNTIME_DIR") from error
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise KeeperAway(
            f"{path} is not this user's own folder with mode 0700", hint="remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def stay_in_runtime_dir() -> None:
    """Fix the current folder for this process and its children, even if XDG_RUNTIME_DIR changes later."""
    os.environ[PREFIX + "RUNTIME_DIR"] = runtime_dir()


def _own_dir() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid():
        return os.path.join(base, "dlrover-hooks")
    return os.path.join(tempfile.gettempdir(), f"dlrover-hooks-{os.getuid()}")


def drill() -> dict[str, str]:
    """This worker's instructions in a drill, see `dlrover_hooks.testing.faults.drill`; empty outside a drill."""
    return {name: os.environ[PREFIX + name.upper()] for name in _DRILL if os.environ.get(PREFIX + name.upper())}


def global_seed() -> int:
    """The seed that Lightning's `seed_everything` put into the environment; 0 if unset, as in Lightning."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def global_batch_size() -> int | None:
    """The global batch size from the environment, for a loop whose loader is created before any adapter.

    Raises:
        UsageError: it is not a positive number of samples.
    """
    text = os.environ.get(PREFIX + "GLOBAL_BATCH_SIZE")
    size: int | None = _parsed("global_batch_size", text, int) if text else None
    if size is not None and size < 1:
        raise UsageError(f"{PREFIX}GLOBAL_BATCH_SIZE={text!r} must be at least 1")
    return size


def plugins() -> str | None:
    """DLROVER_HOOKS_PLUGINS: the plug-ins of jobs of several roles, see `dlrover_hooks.job.plugins.select`."""
    return os.environ.get(PREFIX + "PLUGINS") or None


def ray_address() -> str | None:
    """RAY_ADDRESS; None if it is not set."""
    return os.environ.get("RAY_ADDRESS") or None
