"""Run a module where the kernel refuses some system calls: python refusing.py memfd_create,sendmsg MODULE ARGUMENTS.

A seccomp filter, as container runtimes install them: the calls fail with EPERM, for good.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import struct
import sys

CALLS = {"x86_64": {"memfd_create": 319, "sendmsg": 46}, "aarch64": {"memfd_create": 279, "sendmsg": 211}}
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06  # BPF: the number of the call, compare, answer
_EPERM, _ALLOW = 0x00050001, 0x7FFF0000


def refuse(*names: str) -> None:
    """From here on this process and its children cannot make these calls."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    steps = [(_LOAD, 0, 0, 0)]
    steps += [(_IS, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.c_char_p(program))):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _, names, module, *rest = sys.argv
    refuse(*names.split(","))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__")
