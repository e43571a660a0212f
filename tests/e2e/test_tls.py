"""A master at https with a CA of one's own: calls, the liveness connection, certificates of clients, refusals."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.config import Tls
from dlrover_hooks.errors import MasterAway, UsageError
from tests.e2e.job_script import attach, join


def certificate(folder: Path, name: str, field: str = "CN") -> tuple[str, str]:
    """A certificate that signs itself, and its key. `field`: of the subject, whose value is `name`."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/{field}={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def folder_of_cas(folder: Path, *certs: str) -> str:
    """`folder`, new, with these certificates as CAs, as SSL_CERT_DIR is: OpenSSL finds a file by a hash in its name."""
    folder.mkdir()
    for cert in certs:
        shutil.copy(cert, folder)
    subprocess.run(["openssl", "rehash", str(folder)], check=True, capture_output=True)
    return str(folder)


class Serving:
    """A master with a certificate of its own and one for a client."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = certificate(folder, "master")
        self.client_cert, self.client_key = certificate(folder, "client")
        flags = ["--ssl-certfile", self.cert, "--ssl-keyfile", self.key, "--ssl-client-ca", self.client_cert]
        command = [sys.executable, "-m", "dlrover_hooks.master", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = self.process.stderr.readline().split()[2]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    made = Serving(tmp_path_factory.mktemp("tls"))
    yield made
    made.process.kill()
    made.process.communicate()


VARIABLES = ("DLROVER_HOOKS_CA_FILE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.mark.parametrize("variable", VARIABLES)
def test_calls_and_watches_trust_the_same(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Row 7: by whichever variable the CA is named."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = folder_of_cas(tmp_path / "cas", serving.cert)
    monkeypatch.setenv(variable, folder if variable == "SSL_CERT_DIR" else serving.cert)
    monkeypatch.setenv("DLROVER_HOOKS_CLIENT_CERT", serving.client_cert)
    monkeypatch.setenv("DLROVER_HOOKS_CLIENT_KEY", serving.client_key)
    assert serving.url.startswith("https://")
    clients = {name: MasterClient(serving.url, incarnation=name) for name in ("agent", "w0", "w1")}
    clients["agent"].call(join(job=variable))
    for worker in ("w0", "w1"):
        clients[worker].call(attach(worker, job=variable))
    told = threading.Event()
    clients["w0"].watch(variable, lambda notice: told.set())
    clients["w1"].call(p.Leave(variable, "w1", p.Departure.FAILED))
    assert told.wait(60)
    for client in clients.values():
        client.close()


def test_no_trust_is_said_at_once(serving: Serving) -> None:
    """Row 7: UsageError, which is exit code 78, instead of a minute of new attempts."""
    own = Tls(cert=serving.client_cert, key=serving.client_key)
    refused = {
        "CERTIFICATE_VERIFY_FAILED": own,
        "no-such-file": Tls(ca="no-such-file"),
        "wrong.key": Tls(ca=serving.cert, cert=serving.client_cert, key="wrong.key"),
    }
    for words, tls in refused.items():
        with pytest.raises(UsageError, match=f"{words}(.|\n)*HINT(.|\n)*DLROVER_HOOKS_CA_FILE"):
            MasterClient(serving.url, incarnation="x", tls=tls).call(p.ListJobs())
    nameless = MasterClient(serving.url, incarnation="x", tls=Tls(ca=serving.cert))
    with pytest.raises(MasterAway, match="DLROVER_HOOKS_CLIENT_CERT"):  # the master says nothing before it hangs up
        nameless.call(p.ListJobs(), timeout_s=1.0)
    nameless.close()


@pytest.mark.deep
def test_refused_files_of_the_master(serving: Serving, tmp_path: Path) -> None:
    """Row 7: exit code 78 and words, no traceback."""
    (tmp_path / "bad.pem").write_text("nonsense")
    for flags, words in (
        (["--ssl-certfile", str(tmp_path / "bad.pem")], "bad.pem"),
        (["--ssl-certfile", serving.cert], "key in the same file"),
        (["--ssl-certfile", serving.cert, "--ssl-keyfile", serving.client_key], "client.key"),
        (["--ssl-keyfile", serving.key], "--ssl-certfile"),
    ):
        command = [sys.executable, "-m", "dlrover_hooks.master", "--port", "0", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 78
        assert words in ended.stderr
        assert "HINT" in ended.stderr
        assert "Traceback" not in ended.stderr
