"""The process of a local job's worker.

python -m dlrover_hooks.job.local.worker FOLDER PLACE
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import msgspec

from dlrover_hooks.errors import CallFailed, MasterError
from dlrover_hooks.job.local.prime import submission_of
from dlrover_hooks.job.local.process_platform import outcome_file
from dlrover_hooks.job.local.socket_calls import CallClients, CallServer
from dlrover_hooks.job.sub_master import client_of
from dlrover_hooks.job.worker_process import Outcome, ResolvedCalls, Worker, WorkerPlace
from dlrover_hooks.protocol import AGAIN, WorkerCause

_THREADS_S = 10.0


def main() -> None:
    """Entry point of the module."""
    parser = argparse.ArgumentParser(prog="dlrover_hooks.job.local.worker", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("place")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]
    place = msgspec.json.decode(options.place, type=WorkerPlace)
    place = msgspec.structs.replace(place, token=submission_of(options.folder).token)
    name = f"{place.role} {place.rank}"
    logging.basicConfig(level="WARNING", stream=sys.stderr, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    if sys.path[0] != "":
        sys.path.insert(0, "")  # so that modules in the folder where the job was submitted can be imported
    outcome = run(options.folder, place)
    path = outcome_file(options.folder, place.role, place.rank, place.life)
    with open(path + ".new", "wb") as file:
        file.write(msgspec.json.encode(outcome))
    os.replace(path + ".new", path)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if outcome.cause is not None:
        os._exit(1)
    _name_threads()


def _name_threads() -> None:
    """Python ends this process once all threads that are no daemons have ended: say which do not."""
    deadline = time.monotonic() + _THREADS_S
    for one in threading.enumerate():
        if one is not threading.current_thread() and not one.daemon:
            one.join(max(0.0, deadline - time.monotonic()))
            if one.is_alive():
                logging.getLogger("dlrover_hooks.job").warning(
                    "the function has returned, and this process waits for its thread %r", one.name
                )


def run(folder: str, place: WorkerPlace) -> Outcome:
    """Register as the worker `place`, run its function, and return the outcome.

    Exits the process (code 74) if the master refuses the first request.
    """
    try:
        worker = Worker(place, os._exit)
    except MasterError as error:
        logging.getLogger("dlrover_hooks.job").error("%s", error)
        os._exit(AGAIN)

    def answer(function: str, arguments: list[Any], within_s: float) -> Any:
        if worker.context is None:
            raise CallFailed(f"worker {place.rank} of role {place.role} does not run yet")
        return worker.context.answer(function, arguments, within_s)

    address = os.path.join(folder, f"w-{place.role}-{place.rank}-{place.life}")
    server = CallServer(address, answer)
    try:
        client = client_of(place.master, place.token)
        worker.register(address, ResolvedCalls(place.job, client, CallClients().exchange, driver=worker.is_driver))
        outcome = worker.run()
        worker.leave()
        return outcome
    except MasterError as error:
        return Outcome(WorkerCause.KILLED, f"the master refused it: {error}")
    finally:
        server.close()


if __name__ == "__main__":
    main()
