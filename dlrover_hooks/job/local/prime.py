"""The process of a local job's PrimeMaster.

python -m dlrover_hooks.job.local.prime FOLDER --fd N
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

import msgspec

from dlrover_hooks.client import MasterClient
from dlrover_hooks.job.local.process_platform import LocalAddress, LocalMasters
from dlrover_hooks.job.prime_master import HttpMaster, PrimeMaster, Submission, journal_of
from dlrover_hooks.job.sub_master import client_of


def submission_of(folder: str) -> Submission:
    """The job that was submitted with this folder, which contains `job.json`."""
    with open(os.path.join(folder, "job.json"), "rb") as file:
        return msgspec.json.decode(file.read(), type=Submission)


def main() -> None:
    """Entry point of the module."""
    parser = argparse.ArgumentParser(prog="dlrover_hooks.job.local.prime", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s prime: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    submission = submission_of(options.folder)
    listener = socket.socket(fileno=options.fd)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    journal = journal_of(submission.spec, options.folder)
    http = HttpMaster(listener, journal, submission.token, submission.spec.silent_s)
    client: MasterClient = client_of(url, submission.token)
    platform = LocalMasters(LocalAddress(options.folder, url, submission.token), submission.spec)
    try:
        PrimeMaster(submission, client, platform, http.revive).run()
    finally:
        client.close()
        http.close()


if __name__ == "__main__":
    main()
