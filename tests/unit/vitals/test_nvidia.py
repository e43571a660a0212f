"""What NVML says of a worker's own GPU, through fakes of its functions."""

from __future__ import annotations

import pynvml
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.testing.nvml_fake import MIB, GPUFake, driver
from dlrover_hooks.vitals import nvidia


def test_all_figures_of_a_gpu() -> None:
    gpu = GPUFake(
        "GPU-a",
        use_percent=87,
        used_bytes=5 * MIB,
        total_bytes=9 * MIB,
        temperature_c=71,
        power_mw=654_321,
        ecc_errors=2,
        reasons=pynvml.nvmlClocksEventReasonSwPowerCap
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        | pynvml.nvmlClocksEventReasonGpuIdle,
    )
    with driver(gpu):
        found = nvidia.find(0, None)
        assert found is not None
        sample = found.sample()
    assert sample == p.AcceleratorVitals(
        name="NVIDIA H100 80GB HBM3",
        device="GPU-a",
        use_percent=87.0,
        memory_used_bytes=5 * MIB,
        memory_total_bytes=9 * MIB,
        temperature_c=71,
        power_w=654.321,
        ecc_errors=2,
        throttled_by=("power cap", "thermal slowdown (hardware)"),
    )


def test_the_last_xid_stays() -> None:
    gpu = GPUFake("GPU-a", xids=[31, 79])
    with driver(gpu):
        found = nvidia.find(0, None)
        assert found is not None
        assert found.sample().xid == 79
        assert found.sample().xid == 79
        gpu.xids.append(48)
        assert found.sample().xid == 48


def test_what_a_gpu_does_not_count_is_unknown() -> None:
    names = ("UtilizationRates", "Temperature", "PowerUsage", "TotalEccErrors", "CurrentClocksEventReasons", "Name")
    lacks = frozenset({*(f"nvmlDeviceGet{name}" for name in names), "nvmlDeviceRegisterEvents"})
    with driver(GPUFake("GPU-a", used_bytes=1, lacks=lacks, xids=[79])):
        found = nvidia.find(0, None)
        assert found is not None
        sample = found.sample()
    assert sample == p.AcceleratorVitals(
        name="NVIDIA GPU", device="GPU-a", memory_used_bytes=1, memory_total_bytes=81559 * MIB
    )


def test_an_instance_of_a_gpu_has_that_ones_temperature() -> None:
    board = GPUFake("GPU-a", temperature_c=66, power_mw=1000)
    lacks = frozenset({"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage"})
    part = GPUFake("MIG-1", "H100 MIG 1g.10gb", used_bytes=3, total_bytes=10, lacks=lacks, board=board)
    with driver(board, part):
        found = nvidia.find(0, "MIG-1")
        assert found is not None
        sample = found.sample()
    assert (sample.name, sample.memory_used_bytes, sample.use_percent) == ("H100 MIG 1g.10gb", 3, None)
    assert (sample.temperature_c, sample.power_w) == (66, 1.0)


def test_without_a_driver_or_a_visible_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with driver(GPUFake("GPU-a")):
        assert nvidia.find(0, "") is None

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert nvidia.find(0, None) is None


def test_a_gpu_that_falls_off_the_bus_is_an_error() -> None:
    """Its thread logs it once, see `test_background_sample`."""
    gpu = GPUFake("GPU-a")
    with driver(gpu):
        found = nvidia.find(0, None)
        assert found is not None
        gpu.lost = True
        with pytest.raises(pynvml.NVMLError):
            found.sample()
