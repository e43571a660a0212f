"""The role `dataset`: tokenizes instructions and answers, and serves them by position.

They are from Python's standard library: an instruction is the signature of a function, and the answer is the first
line of its docstring. A token is a byte.
"""

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dlrover_hooks.job import current_worker

LENGTH = 112  # tokens of an instruction with its answer


def pairs() -> Iterator[tuple[bytes, bytes]]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"def {node.name}({ast.unparse(node.args)}):\n".encode(), f"{text.splitlines()[0]}\n".encode()


@cache
def samples() -> list[tuple[list[int], int]]:
    """For each pair: its tokens, padded with zeros to `LENGTH`, and the number of tokens of the instruction."""
    short = [(asked, answer) for asked, answer in pairs() if len(asked) + len(answer) <= LENGTH]
    return [(list((asked + answer).ljust(LENGTH, b"\0")), len(asked)) for asked, answer in short]


def tokens(positions: list[int]) -> list[tuple[list[int], int]]:
    """The samples at `positions`. Depends on the positions only, so that a call may be repeated."""
    return [samples()[position] for position in positions]


def dataset() -> None:
    current_worker().serve(count=lambda: len(samples()), tokens=tokens)
