"""What the operator answers to the probes of a kubelet."""

from __future__ import annotations

import pytest
import requests

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.operator.health_endpoint import HealthEndpoint


def test_probes_are_answered_until_the_end() -> None:
    healthy, ready = [True], [(True, "leads")]
    endpoint = HealthEndpoint(0, lambda: healthy[0], lambda: ready[0])
    endpoint.start()
    url = f"http://127.0.0.1:{endpoint.port}"

    def answer(path: str) -> tuple[int, str]:
        found = requests.get(url + path, timeout=30)
        return found.status_code, found.text.strip()

    assert answer("/healthz") == (200, "ok")
    assert answer("/readyz") == (200, "leads")
    healthy[0], ready[0] = False, (False, "not yet")
    assert answer("/healthz") == (503, "failed")
    assert answer("/readyz") == (503, "not yet")
    assert answer("/metrics")[0] == 404
    with pytest.raises(UsageError, match=f"port {endpoint.port} cannot be used"):
        HealthEndpoint(endpoint.port, lambda: True, lambda: ready[0])
    endpoint.stop()
    with pytest.raises(requests.ConnectionError):
        answer("/healthz")
