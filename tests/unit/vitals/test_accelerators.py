"""A plug-in of another vendor, installed as a real distribution, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VENDOR = """
from dlrover_hooks.protocol import AcceleratorVitals

class Chip:
    def __init__(self, local_rank):
        self.name, self.local_rank = "Vendor 9", local_rank

    def sample(self):
        return ANSWER

def find(local_rank):
    return Chip(local_rank)
"""
ASK = """
import logging, threading
import msgspec
from dlrover_hooks.worker import resource_usage
logging.basicConfig(format="%(message)s")
resource_usage.EVERY_S = 0.0
sampler = resource_usage.Sampler("rank 2 of job test")
pause = threading.Event()
sampler.sample()
own = sampler._accelerator
for _ in range(6000):
    if own.value is not None or own._failed or not own._thread.alive:
        break
    pause.wait(0.01)
print(msgspec.json.encode(sampler.sample().accelerator).decode())
sampler.stop()
"""


def install(site: Path, name: str, code: str) -> None:
    """A distribution with a module and an entry point, as pip would put it there."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dlrover_hooks.accelerators]\n{name} = {name}:find\n")


def asked(site: Path, **environment: str) -> tuple[str, str]:
    """What a worker with local rank 2 prints, and its log."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "LOCAL_RANK": "2"} | environment
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.requirement("DL-6")
def test_an_installed_plug_in_is_found(tmp_path: Path) -> None:
    """One that breaks, and one that finds no device, leave the others their turn."""
    install(tmp_path, "a_broken", "raise ImportError('no driver library')")
    install(tmp_path, "b_absent", "def find(local_rank): return None")
    answer = 'AcceleratorVitals(name=self.name, device=f"chip-{self.local_rank}", use_percent=12.5)'
    install(tmp_path, "c_vendor", VENDOR.replace("ANSWER", answer))
    found, log = asked(tmp_path)
    assert found == '{"name":"Vendor 9","device":"chip-2","use_percent":12.5}'
    assert log.splitlines() == [
        "the accelerator plug-in a_broken (a_broken:find) is left out: ImportError: no driver library"
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("open('/no/such/device')", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/device'"),
        ("exec('raise SystemError')", "SystemError: "),
        ("'87 %'", "ValidationError: Expected `object`, got `str`"),
        ("AcceleratorVitals(name='', use_percent=-1)", "ValidationError: Expected `float` >= 0.0 - at `$.use_percent`"),
        ("AcceleratorVitals(name='', xid='seven')", "ValidationError: Expected `int | null`, got `str` - at `$.xid`"),
    ],
)
def test_a_plug_in_that_fails_costs_only_its_figures(tmp_path: Path, answer: str, said: str) -> None:
    """A heartbeat with what the master refuses would be an error of the training loop."""
    install(tmp_path, "vendor", VENDOR.replace("ANSWER", answer))
    found, log = asked(tmp_path)
    assert found == "null"
    assert log == f"rank 2 of job test: the accelerator cannot be sampled: {said}\n"


def test_without_a_plug_in_nvidias_driver_is_asked(tmp_path: Path) -> None:
    assert asked(tmp_path, CUDA_VISIBLE_DEVICES="") == ("null", "")
