"""`dlrover-hooks run`: a keeper, N workers and, on the first node, the master; and their supervision.

A launcher owns the processes of its node. Its agent (`launcher.agent`) joins the round for the workers and replaces
dead ones. The launcher owns the master's listening socket and restarts a dead master on it, so that clients only wait.
A dead keeper is restarted too. However the launcher ends, no process, port, segment or temporary file is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import sys
import uuid
from collections.abc import Callable
from types import FrameType

import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.host.ports import listen
from dlrover_hooks.launcher import requeue
from dlrover_hooks.launcher.agent import Agent
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.failures.summary import Failure, FailureRecord, FailureSummary, again, screen
from dlrover_hooks.launcher.failures.verdict import GAVE_UP, USAGE, USER_ERROR, counted, farewell
from dlrover_hooks.launcher.interruption import Eviction, after, last_code
from dlrover_hooks.launcher.launcher_lock import sole
from dlrover_hooks.launcher.master_endpoint import Endpoint, endpoint, etcd_journal, own_host, serve, url_of
from dlrover_hooks.launcher.master_requests import AgentAddress
from dlrover_hooks.launcher.nodes.agent_options import (
    AGENT,
    agent_options,
    lost_with_the_master,
    script_hash,
    user_name,
)
from dlrover_hooks.launcher.nodes.node_host import NodeHost
from dlrover_hooks.launcher.options import LaunchOptions, ScalingOptions
from dlrover_hooks.launcher.processes.log_files import Logs
from dlrover_hooks.launcher.processes.services import Served, Services, temporary_file, temporary_journal
from dlrover_hooks.launcher.processes.workers import Workers, newcomer_command
from dlrover_hooks.launcher.running_jobs import listed
from dlrover_hooks.launcher.tasks.task_processes import TaskProcesses
from dlrover_hooks.launcher.tasks.task_supervisor import TaskSupervisor
from dlrover_hooks.launcher.warm.standby_pool import Standbys
from dlrover_hooks.scalers.process_scaler import ProcessScaler
from dlrover_hooks.vitals.node_reports import NodeReports
from dlrover_hooks.worker import preimport_list

log = logging.getLogger("dlrover_hooks.run")
_OF_TASKS = ("tensorflow", "dlrover_hooks.integrations.tensorflow")
"""What all tasks of a parameter server job import."""
_OF_ROUNDS = ("DLROVER_HOOKS_LAUNCHER", "DLROVER_HOOKS_MIN_WORKERS", "DLROVER_HOOKS_MAX_WORKERS")
TASK_ENVIRONMENT = {"GRPC_FAIL_FAST": "use_caller"}
"""So that a request to a server that is gone fails at once, as TensorFlow's documentation asks for."""


class Launcher:
    """Runs one job on one node; `run` returns the exit code. Main thread only (it handles SIGINT and SIGTERM)."""

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        config = settings.load()
        self.job = options.job or config.job
        if options.nodes.most > 1 and not options.job and not config.named:
            raise UsageError(
                f"--nnodes {options.nodes}: the nodes need one name for the job, or each would start its own",
                hint="give all of them the same --job NAME (or DLROVER_HOOKS_JOB)",
            )
        self._fresh = options.fresh or config.fresh
        self._node = settings.place().node
        self._signal: int | None = None
        self._save_to = config.save_to
        self._workers: Workers | TaskProcesses | NodeHost
        self._follow: Callable[[], None] = lambda: None
        self._seen: p.JobView | None = None
        self._failures: tuple[Failure, ...] = ()
        self._selector = selectors.DefaultSelector()
        self._slurm = requeue.here()
        self._eviction = Eviction(
            self.job, self._node, preemption=options.preemption, grace_s=options.grace_s, slurm=self._slurm
        )

    def run(self) -> int:
        """Run until the job is over; the exit code."""
        code = self._run()
        command = again(sys.argv[1:], self.job)
        if self._failures:
            story = FailureSummary(self.job, code, self._failures, command)
            sys.stderr.write(screen(story, colour=sys.stderr.isatty()))
        if self._signal is not None:
            log.info("%s", farewell(self.job, self._seen, command))
        return last_code(code, self._slurm, wanted=self.options.requeue)

    def _run(self) -> int:
        with contextlib.ExitStack() as owned:
            settings.stay_in_runtime_dir()
            owned.enter_context(sole(self.job, self._node))
            if self.options.nodes.most == 1:
                owned.enter_context(sole(self.job, ""))
            master, served = self._find_master(owned)
            token = self.options.token or (None if self.options.endpoint else secrets.token_hex(16))
            alone = served is not None and not self.options.etcd
            address = AgentAddress(self.job, self._node, self._host(master), serves=alone)
            self._client = MasterClient(master.url, token, incarnation=uuid.uuid4().hex)
            environment = self._environment(master.url, token or "", address)
            if self.options.ps is not None:
                return self._run_tasks(owned, self.options.ps, environment, served, token)
            if self.options.scaling is not None:
                return self._run_nodes(owned, self.options.scaling, served, token)
            command = self.options.command
            preload = self.options.preload or owned.enter_context(temporary_file("preload"))
            environment["DLROVER_HOOKS_PRELOAD"] = preload
            standbys = self._standbys(owned, preload, settings.worker_environment(**environment))
            logs = None
            if self.options.log_dir:
                logs = Logs(self.options.log_dir, self.options.redirects, self.options.tee)
                owned.callback(logs.close)
            workers = Workers(command, newcomer_command(command), environment, self._selector, standbys, logs)
            self._workers = workers
            self._take_signals(owned)
            found = owned.enter_context(listed(self.job, self._client.url, token))
            own = () if self.options.preload else (preload,)
            temporary = (*own, found, *self.options.temporary)
            self._services = Services(self.job, self._node, token, served, temporary, self._selector)
            owned.callback(self._services.end)
            owned.callback(self._client.close)
            owned.callback(workers.end)
            owned.callback(self._eviction.close)
            reports = self._reports(owned)
            self._follow = lambda: reports.follow(workers.pids())
            log.info("job %s: %s, %s", self.job, self._size(), self._where(master, served))
            agent = Agent(self.options, address, self._client, workers, self._selector, self._look,
                          fresh=self._fresh)  # fmt: skip
            code = agent.run()
            if agent.budget.record.failures:
                self._failures = self._seen_through(agent.budget.record)
            return code

    def _run_tasks(
        self,
        owned: contextlib.ExitStack,
        ps: int,
        environment: dict[str, str],
        served: Served | None,
        token: str | None,
    ) -> int:
        """A parameter server job: the command is the chief, the master lists the tasks."""
        environment = TASK_ENVIRONMENT | {name: value for name, value in environment.items() if name not in _OF_ROUNDS}
        preload = owned.enter_context(temporary_file("preload"))
        with open(preload, "wb") as file:
            file.write(preimport_list.encoded(_OF_TASKS))
        standbys = self._standbys(owned, preload, settings.worker_environment(**environment))
        processes = self._workers = TaskProcesses(
            self.job, self.options.command, environment, "127.0.0.1", self._selector, standbys
        )
        self._take_signals(owned)
        planned = self.options.scaling is not None
        found = owned.enter_context(listed(self.job, self._client.url, token, tasks=True, planned=planned))
        self._services = Services(self.job, self._node, token, served, (preload, found), self._selector, keeper=False)
        owned.callback(self._services.end)
        owned.callback(self._client.close)
        owned.callback(processes.end)
        owned.callback(self._eviction.close)
        supervisor = TaskSupervisor(
            self.job, self._first_tasks(ps), self._client, processes, self._selector, self._look,
            self._reports(owned).follow, max_restarts=self.options.max_restarts,
            restart_window_s=self.options.restart_window_s,
        )  # fmt: skip
        return supervisor.run()

    def _first_tasks(self, ps: int) -> p.ScaleTasks | p.StartScaling:
        """How a parameter server job begins: with so many tasks, or with those that the master plans."""
        workers, scaling = self.options.workers.most, self.options.scaling
        if scaling is None:
            log.info("job %s: chief, %s, %s, master at %s", self.job, counted(ps, "parameter server"),
                     counted(workers, "worker"), self._client.url)  # fmt: skip
            return p.ScaleTasks(self.job, self._client.incarnation, ps=ps, workers=workers,
                                ready_within_s=self.options.ready_s, only_first=True)  # fmt: skip
        limits = scaling.limits
        log.info("job %s: mode %s, chief, %d to %s, %d to %s, master at %s", self.job, scaling.mode.value,
                 limits.min_ps, counted(limits.max_ps, "parameter server"), limits.min_workers,
                 counted(limits.max_workers, "worker"), self._client.url)  # fmt: skip
        log.info("job %s: %s", self.job, lost_with_the_master(scaling.mode, self.options.journal))
        return self._start_scaling(scaling, msgspec.structs.replace(scaling.pace, start_s=self.options.ready_s))

    def _start_scaling(self, scaling: ScalingOptions, pace: p.ScalingPace) -> p.StartScaling:
        options = self.options
        return p.StartScaling(
            self.job, self._client.incarnation, scaling.mode, scaling.limits, pace=pace, ps=options.ps is not None,
            relaunches=options.max_restarts, relaunch_window_s=options.restart_window_s,
            user=user_name(), script_hash=script_hash(options.command),
        )  # fmt: skip

    def _run_nodes(
        self, owned: contextlib.ExitStack, scaling: ScalingOptions, served: Served | None, token: str | None
    ) -> int:
        """A job whose nodes the master plans: each is an agent on this machine."""
        self._take_signals(owned)
        found = owned.enter_context(listed(self.job, self._client.url, token, planned=True))
        preload = owned.enter_context(temporary_file("preload"))
        self._services = Services(self.job, self._node, token, served, (preload, found), self._selector, keeper=False)
        owned.callback(self._services.end)
        owned.callback(self._client.close)
        owned.callback(self._eviction.close)
        options, limits, first = self.options, scaling.limits, self._fresh

        def command(node: p.Node) -> list[str]:
            nonlocal first
            told = agent_options(options, self._client.url, job=self.job, fresh=first, preload=preload)
            first = False
            return [sys.executable, "-m", AGENT, msgspec.json.encode(told).decode()]

        def environment(node: p.Node) -> dict[str, str]:
            return settings.worker_environment(
                DLROVER_HOOKS_JOB=self.job, DLROVER_HOOKS_TOKEN=token or "", DLROVER_HOOKS_NODE=node.name
            )

        request = self._start_scaling(scaling, scaling.pace)
        scaler = ProcessScaler(
            self.job, command, environment, grace_s=options.grace_s, user_errors=(USER_ERROR, USAGE, GAVE_UP)
        )
        host = self._workers = NodeHost(request, self._client, scaler, self._selector, self._look)
        log.info("job %s: mode %s, %d to %s with %s each, master at %s", self.job, scaling.mode.value,
                 limits.min_workers, counted(limits.max_workers, "node"), counted(options.workers.most, "worker"),
                 self._client.url)  # fmt: skip
        log.info("job %s: %s", self.job, lost_with_the_master(scaling.mode, options.journal))
        return host.run()

    def _reports(self, owned: contextlib.ExitStack) -> NodeReports:
        reports = NodeReports(
            self._client, self.job, self._client.incarnation, self._node, _local_folder(self._save_to)
        )
        owned.callback(reports.stop)
        reports.start()
        return reports

    def _standbys(self, owned: contextlib.ExitStack, preload: str, environment: dict[str, str]) -> Standbys | None:
        if not (count := self.options.standbys):
            return None
        script, unasked = self.options.command[2:], self.options.standby is None
        standbys = Standbys(count, preload, environment, script, spare=unasked)
        owned.callback(standbys.close)
        return standbys

    def _seen_through(self, record: FailureRecord) -> tuple[Failure, ...]:
        if self._seen is None:
            with contextlib.suppress(HooksError):
                self._seen = self._client.call(p.ShowJob(self.job, self._node), timeout_s=2.0)
        record.heard(self._seen)
        return tuple(record.failures)

    def _find_master(self, owned: contextlib.ExitStack) -> tuple[Endpoint, Served | None]:
        """The master's address; socket and journal if this launcher serves it. Raises UsageError, LaunchError."""
        if self.options.etcd:
            return self._one_of_several(owned)
        if self.options.endpoint:
            where = endpoint(self.options.endpoint)
            self._check_token(where, f"the master at {where.host}")
            listener = serve(where, self.options.node_rank)
            if listener is None:
                return where, None
        else:
            listener = listen(self.options.port)
        owned.callback(listener.close)
        journal = self.options.journal or owned.enter_context(temporary_journal())
        ephemeral, hang_timeout_s = self.options.journal is None, self.options.hang_timeout_s
        brain = self.options.scaling.brain if self.options.scaling is not None else ""
        return endpoint(url_of(listener)), Served(listener, journal, ephemeral, hang_timeout_s, brain)

    def _one_of_several(self, owned: contextlib.ExitStack) -> tuple[Endpoint, Served]:
        """This node's master. Those of the other nodes have the same journal in etcd; a standby names the leader.

        Raises UsageError, LaunchError.
        """
        journal, member = etcd_journal(self.options.endpoint, self.job)
        self._check_token(member, f"this node's master (etcd is at {member.host})")
        own = self.options.local_addr or own_host(member)
        listener = listen(self.options.port, own if member.local else "::" if ":" in own else "0.0.0.0")
        owned.callback(listener.close)
        here = Endpoint(own, listener.getsockname()[1])
        return here, Served(listener, journal, False, self.options.hang_timeout_s, advertise=here.url)

    def _check_token(self, where: Endpoint, master: str) -> None:
        if not where.local and not self.options.token:
            raise UsageError(
                f"{master} needs a token: anybody who reaches it could steer your training",
                hint="make one (openssl rand -hex 16) and set DLROVER_HOOKS_TOKEN to it on all nodes",
            )

    def _host(self, master: Endpoint) -> str:
        """The address at which other nodes reach this one: on the route to the master's address, or to etcd."""
        if not self.options.endpoint:
            return "127.0.0.1"
        if self.options.etcd:
            return master.host
        return self.options.local_addr or own_host(endpoint(self.options.endpoint))

    def _size(self) -> str:
        nodes, workers = self.options.nodes, self.options.workers
        here = counted(workers.most, "worker") if workers.fixed else f"{workers} workers"
        return here if nodes.most == 1 else f"{nodes} nodes, {here} each"

    def _where(self, master: Endpoint, served: Served | None) -> str:
        if self.options.etcd:
            return f"this node's master at {master.url}"
        return f"master at {master.url}" + ("" if served is not None else " (served elsewhere)")

    def _environment(self, url: str, token: str, address: AgentAddress) -> dict[str, str]:
        """torchrun's variables (Lightning picks the wrong environment without TORCHELASTIC_RUN_ID), and our own."""
        return {
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_MAX_RESTARTS": str(self.options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "DLROVER_HOOKS_JOB": self.job,
            "DLROVER_HOOKS_MASTER": url,
            "DLROVER_HOOKS_TOKEN": token,
            "DLROVER_HOOKS_NODE": self._node,
            "DLROVER_HOOKS_GRACE": f"{self.options.grace_s:g}s" if self.options.grace_s else "",
            "DLROVER_HOOKS_LAUNCHER": self._client.incarnation,
            "DLROVER_HOOKS_HOST": address.host,
            "DLROVER_HOOKS_MIN_WORKERS": str(self.options.min_workers),
            "DLROVER_HOOKS_MAX_WORKERS": str(self.options.max_workers),
            "DLROVER_HOOKS_MASTER_AWAY_S": str(self.options.master_away_s),
        }

    def _look(self) -> None:
        """Handle a signal (raises Over when the workers have ended); restart services that died."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 1024):  # a pipe that is not emptied keeps the selector awake
                pass
        if self._signal is None and self._eviction.due(self._client):
            self._signal = signal.SIGTERM
        if self._signal is not None:
            log.info("%s: ending %s", signal.Signals(self._signal).name, counted(len(self._workers.children), "worker"))
            codes = self._workers.end(min(self.options.grace_s, self._eviction.left_s))
            with contextlib.suppress(HooksError):
                self._seen = self._client.call(p.ShowJob(self.job, self._node), timeout_s=2.0)
            raise Over(after(self._signal, codes, self._seen))
        self._services.revive()
        self._workers.refill()
        self._follow()

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _take_signals(self, owned: contextlib.ExitStack) -> None:
        """The first signal ends the run gracefully; a second one kills the workers at once."""
        wake, wake_end = os.pipe()
        for end in (wake, wake_end):
            os.set_blocking(end, False)
        self._wake = wake
        owned.callback(lambda: (os.close(wake), os.close(wake_end)))
        owned.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake_end))
        self._selector.register(wake, selectors.EVENT_READ)
        for number in (signal.SIGINT, signal.SIGTERM):
            owned.callback(signal.signal, number, signal.signal(number, self._signalled))
        warned = signal.signal(signal.SIGUSR1, lambda number, _: self._eviction.signalled(number))
        owned.callback(signal.signal, signal.SIGUSR1, warned)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._insist)

    def _insist(self, number: int, frame: FrameType | None) -> None:
        self._workers.signal(signal.SIGKILL)


def _local_folder(save_to: str | None) -> str:
    """The folder of `save_to`; the working directory if that is not given in the environment, or no local folder."""
    path = (save_to or "").removeprefix("file://")
    return path if path and "://" not in path else os.getcwd()
