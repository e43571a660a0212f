"""DL-91: a keeper that commits what a dead trainer left stands in no successor's way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.claim import Claim
from dlrover_hooks.errors import SaveToBusy
from dlrover_hooks.testing import faulty_store

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


def test_of_two_that_come_at_once_one_gets_an_object_store() -> None:
    """DL-91: both have seen that nobody holds it; the lease is put only if it is still absent."""
    with faulty_store() as bucket:

        def overtake(verb: str, path: str) -> None:
            if verb == "put" and path.endswith("owner.json"):
                bucket.fail = lambda verb, path: None
                note = b'{"job": "quick", "owner": "its master", "expires": 9e12}'
                bucket.objects["bucket/ck/owner.json"] = note

        bucket.fail = overtake
        with pytest.raises(SaveToBusy, match=r"'quick' \(its master\)"):
            Claim.take("faulty://bucket/ck", None, "slow", "us")
        assert b"quick" in bucket.objects["bucket/ck/owner.json"]


def test_a_store_that_hangs_holds_up_no_claim_elsewhere() -> None:
    """DL-90: one master serves many jobs."""
    with faulty_store() as bucket:
        over, waiting = threading.Event(), threading.Event()

        def hang(verb: str, path: str) -> None:
            if "dead" in path:
                waiting.set()
                over.wait(20)

        bucket.fail = hang
        stuck = threading.Thread(target=lambda: Claim.take("faulty://dead/ck", None, "one", "us").release())
        stuck.start()
        assert waiting.wait(20)
        Claim.take("faulty://alive/ck", None, "two", "us").release()
        assert stuck.is_alive()
        over.set()
        stuck.join(20)
