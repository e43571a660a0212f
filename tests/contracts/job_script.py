"""A role that is a script: writes its arguments into a file of the job, for tests/contracts/test_job_backends.py."""

from __future__ import annotations

import sys
from pathlib import Path

from dlrover_hooks.job import current_worker

if __name__ == "__main__":
    Path(current_worker().config["folder"], "script").write_text(" ".join(sys.argv[1:]))
