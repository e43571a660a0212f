"""Sets limits of its own process, then replaces itself by another program. Run by `prepared_command`, never imported.

Usage: exec_prepared.py REPORT PARENT DEATH_SIGNAL CGROUP_FDS CORES DATA_BYTES COMMAND...

An argument that is "-" leaves out what it stands for. What fails is written to the descriptor REPORT, as
"ERRNO\\0TEXT\\0PATH", and to stderr without one. The exit code is 127 then, as a shell's.

Uses the standard library alone and imports little: each start of a worker waits for it.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _numbers(text: str) -> list[int]:
    return [] if text == "-" else [int(one) for one in text.split(",")]


def _die_with_parent(number: int, parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def _environment() -> dict[bytes, bytes]:
    """As the parent gave it: in the C locale the interpreter has set LC_CTYPE in os.environ."""
    with open("/proc/self/environ", "rb") as file:
        return dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)


def _limit_data(nbytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _become(command: list[str], env: dict[bytes, bytes]) -> None:
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:  # its path is the last one that was tried
        raise OSError(error.errno, error.strerror, command[0]) from None


def _fail(error: OSError, report: str) -> None:
    if report == "-":
        sys.stderr.write(f"cannot start the program: {error}\n")
        sys.stderr.flush()
    else:
        what = f"{error.errno or 0}\0{error.strerror or error}\0{error.filename or ''}"
        os.write(int(report), what.encode(errors="replace"))
    os._exit(127)


def _main() -> None:
    report, parent, death, cgroups, cores, data, *command = sys.argv[1:]
    try:
        env = _environment()
        if report != "-":
            os.set_inheritable(int(report), False)  # the kernel closes it when the program runs
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and the program would
            signal.signal(number, signal.SIG_DFL)
        if death != "-":
            _die_with_parent(int(death), int(parent))
        for descriptor in _numbers(cgroups):
            os.write(descriptor, b"0")
            os.close(descriptor)
        if cores != "-":
            os.sched_setaffinity(0, _numbers(cores))
        if data != "-":
            _limit_data(int(data))
        _become(command, env)
    except OSError as error:
        _fail(error, report)


_main()
