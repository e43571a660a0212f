"""The process of a local job's SubMaster.

python -m dlrover_hooks.job.local.sub_master FOLDER ROLE
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

from dlrover_hooks.job.local.host import host_socket
from dlrover_hooks.job.local.prime import submission_of
from dlrover_hooks.job.local.process_platform import LocalAddress, LocalWorkers
from dlrover_hooks.job.local.socket_calls import CallClient
from dlrover_hooks.job.sub_master import SubMaster


def main() -> None:
    """Entry point of the module."""
    parser = argparse.ArgumentParser(prog="dlrover_hooks.job.local.sub_master", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("role")
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s sub-master: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    submission = submission_of(options.folder)
    spec, url = submission.spec, CallClient(host_socket(options.folder)).call("url")
    platform = LocalWorkers(
        LocalAddress(options.folder, url, submission.token), spec, options.role, socket.gethostname()
    )
    SubMaster(submission, options.role, url, platform).run()
    os._exit(0)  # its threads may still be blocked in a call


if __name__ == "__main__":
    main()
