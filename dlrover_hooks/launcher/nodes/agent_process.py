"""`python -m dlrover_hooks.launcher.nodes.agent_process OPTIONS`: the agent of one planned node.

OPTIONS are the `LaunchOptions` of the job as JSON. Node, token and the master's address are in the environment.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import HooksError, LaunchError, UsageError
from dlrover_hooks.launcher.failures.verdict import GAVE_UP, USAGE
from dlrover_hooks.launcher.node_supervisor import Launcher
from dlrover_hooks.launcher.options import LaunchOptions

log = logging.getLogger("dlrover_hooks.run")


def main(words: list[str]) -> int:
    """Run the agent; the exit code is that of `dlrover-hooks run`."""
    node = settings.place().node
    logging.basicConfig(format=f"[dlrover-hooks {node}] %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        options = msgspec.json.decode(words[0], type=LaunchOptions)
        return Launcher(msgspec.structs.replace(options, token=settings.load().token)).run()
    except HooksError as error:
        log.error("%s", error)
        return USAGE if isinstance(error, (UsageError, LaunchError)) else GAVE_UP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
