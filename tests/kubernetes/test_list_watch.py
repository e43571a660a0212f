"""A watched collection through what breaks a watch: a connection that is cut, an API server that dies, lost history."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.testing.tcp_proxy import Proxy
from tests.kubernetes.control_plane import ControlPlane, control_plane
from tests.waiting import until

pytestmark = pytest.mark.kubernetes


class Watched:
    """The ConfigMaps of a new namespace, watched through a proxy."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.path = f"/api/v1/namespaces/{plane.namespace()}/configmaps"
        self.proxy = Proxy(plane.url)
        config = json.loads(Path(plane.kubeconfig).read_text())
        config["clusters"][0]["cluster"]["server"] = self.proxy.url.replace("http:", "https:")
        (folder / "kubeconfig").write_text(json.dumps(config))
        self.seen: dict[str, str] = {}
        """Versions by name, as the changes say."""
        self.api = ApiServer(kubeconfig=str(folder / "kubeconfig"))
        self.watch = ListWatch(self.api, self.path, self.changed)

    def changed(self, change: ObjectChange) -> None:
        meta = change.manifest["metadata"]
        if change.deleted:
            del self.seen[meta["name"]]
        else:
            self.seen[meta["name"]] = meta["resourceVersion"]

    def close(self) -> None:
        self.watch.stop()
        self.api.close()
        self.proxy.close()

    def put(self, name: str, value: str) -> None:
        body: dict[str, Any] = {"metadata": {"name": name}, "data": {"value": value}}
        if name in self.there():
            self.plane.api.replace(f"{self.path}/{name}", body)
        else:
            self.plane.api.create(self.path, body)

    def there(self) -> dict[str, str]:
        items = self.plane.api.get(self.path)["items"]
        return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in items}

    def agrees(self, what: str) -> None:
        until(lambda: self.seen == self.there(), what, diagnostic=lambda: (self.seen, self.there()))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(control_plane(), tmp_path)
    yield made
    made.close()


def test_what_there_is_and_what_changes_is_told(watched: Watched) -> None:
    for number in range(3):
        watched.put(f"m{number}", "old")
    watched.watch.start(60)
    assert set(watched.seen) == {"m0", "m1", "m2"}
    watched.put("m0", "new")
    watched.put("m3", "new")
    watched.plane.api.delete(f"{watched.path}/m1")
    watched.agrees("the changes")
    assert watched.watch.lists == 1


def test_a_long_list_comes_in_pages(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrover_hooks.kubernetes.list_watch.PAGE", 4)
    for number in range(11):
        watched.put(f"m{number}", "old")
    watched.watch.start(60)
    assert watched.seen == watched.there()


def test_a_watch_that_is_cut_goes_on_where_it_was(watched: Watched) -> None:
    watched.watch.start(60)
    watched.put("before", "old")
    watched.agrees("the first")
    watched.proxy.cut(0.5)
    watched.put("during", "old")
    watched.plane.api.delete(f"{watched.path}/before")
    watched.agrees("what changed while it was cut")
    assert watched.watch.lists == 1


def test_after_a_gap_in_the_history_everything_is_listed_again(watched: Watched) -> None:
    """An API server that was started again has no history: the watch is refused with 410. Deletions are not missed."""
    watched.watch.start(60)
    for number in range(3):
        watched.put(f"m{number}", "old")
    watched.agrees("all of them")
    watched.proxy.cut(3600.0)
    watched.plane.api.delete(f"{watched.path}/m0")
    watched.put("m1", "new")
    watched.put("m3", "new")
    watched.plane.kill("kube-apiserver")
    watched.plane.start_api_server()
    assert set(watched.seen) == {"m0", "m1", "m2"}
    watched.proxy.cut(0.0)
    watched.agrees("what changed meanwhile")
    assert watched.watch.lists == 2


def test_a_stop_ends_a_watch_that_is_quiet(watched: Watched) -> None:
    watched.watch.start(60)
    until(lambda: watched.watch._stream is not None, "the watch")
    assert watched.watch._thread.stop(20)


def test_the_certificate_of_the_cluster_is_checked(watched: Watched, tmp_path: Path) -> None:
    config = json.loads(Path(watched.plane.kubeconfig).read_text())
    other = Path("/etc/ssl/certs/ca-certificates.crt").read_bytes()
    config["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(other).decode()
    (tmp_path / "wrong").write_text(json.dumps(config))
    with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        ApiServer(kubeconfig=str(tmp_path / "wrong")).get(watched.path)
