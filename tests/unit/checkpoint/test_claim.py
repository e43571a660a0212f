"""DL-91: a keeper that commits what a dead trainer left stands in no successor's way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.claim import Claim
from dlrover_hooks.errors import SaveToBusy

HOLD = (
    "from dlrover_hooks.checkpoint.claim import Claim; import sys; "
    "c = Claim.take({!r}, None, 'job', 'keeper, pid 1'); print('held', flush=True); sys.stdin.read(); c.release()"
)


def test_a_keepers_short_claim_is_waited_for_by_its_own_job(tmp_path: Path) -> None:
    """Another job is refused at once, as ever."""
    url = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(url)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"held\n"
        with pytest.raises(SaveToBusy, match="keeper, pid 1"):
            Claim.take(url, None, "other", "pid 2")
        release = threading.Timer(0.2, keeper.stdin.close)
        release.start()
        Claim.take(url, None, "job", "pid 3").release()
        release.join()
