"""Builds the control plane of Kubernetes from Debian's source package: `make kubernetes`.

kube-apiserver, kube-controller-manager, kube-scheduler and kubectl, once, into the user's cache directory. Debian's
compiler is unpacked beside them for the build alone: nothing on the system changes, and no network but Debian's
archive is used. Takes about 7 minutes on 2 slow cores, and 3 GB of disk while it runs. No packages hold these servers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

VERSION = "1.20.2"
"""Of Debian 12, whose source package has all dependencies with it."""
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
COMPILER = ("golang-1.19-go", "golang-1.19-src")
REFLECT = "golang-github-modern-go-reflect2-dev"
"""Its version in the source package ends the server at the first map that it encodes, if Go is newer than 1.17."""
ARCHIVE, SUITE = "http://deb.debian.org/debian", "bookworm"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_KUBERNETES = Path("src/k8s.io/kubernetes")
_SET_VERSION = [
    f"-X k8s.io/kubernetes/vendor/k8s.io/{module}.{name}={value}"
    for module in ("component-base/version", "client-go/pkg/version")
    for name, value in {"gitVersion": f"v{VERSION}", "gitMajor": "1", "gitMinor": "20"}.items()
]


def cache() -> Path:
    """Where the programs are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dlrover-hooks" / f"kubernetes-{VERSION}"


def built() -> bool:
    """All programs are there."""
    return all((cache() / name).is_file() for name in PROGRAMS)


def main() -> int:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build: wait for it
        if built():
            print(f"Kubernetes {VERSION}: {cache()}")
            return 0
        work = cache() / "build"
        shutil.rmtree(work, ignore_errors=True)
        began = time.monotonic()
        try:
            _fetch(work)
            _build(work)
            for name in PROGRAMS:
                (work / "bin" / name).rename(cache() / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        print(f"Kubernetes {VERSION}: {cache()}, built in {time.monotonic() - began:.0f} s")
    return 0


def _fetch(work: Path) -> None:
    """Download and unpack, with lists and a cache of apt of our own."""
    print(f"downloading Kubernetes {VERSION} and its compiler (150 MB)", flush=True)
    for folder in ("lists/partial", "cache/archives/partial", "packages"):
        (work / folder).mkdir(parents=True)
    lines = [f"{kind} [signed-by={KEYS}] {ARCHIVE} {SUITE} main\n" for kind in ("deb", "deb-src")]
    (work / "sources.list").write_text("".join(lines))
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list", "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": work / "lists", "Dir::Cache": work / "cache", "APT::Sandbox::User": "root",
    }  # fmt: skip
    (work / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    env = os.environ | {"APT_CONFIG": str(work / "apt.conf")}
    packages = work / "packages"
    for command in (["update"], ["source", "--download-only", "kubernetes"], ["download", *COMPILER, REFLECT]):
        _run(["apt-get", "-qq", *command], packages, env)
    for package in packages.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(work / "unpacked")], work)
    target = work / "go" / _KUBERNETES
    target.parent.mkdir(parents=True)
    (description,) = packages.glob("*.dsc")
    _run(["dpkg-source", "--no-check", "-x", str(description), str(target)], work)  # apt has checked it


def _build(work: Path) -> None:
    source, go = work / "go" / _KUBERNETES, work / "unpacked/usr/lib/go-1.19"
    env = os.environ | {
        "GOROOT": str(go), "GOPATH": str(work / "go"), "GOCACHE": str(work / "compiled"), "GO111MODULE": "off",
        "GOPROXY": "off", "GOFLAGS": "", "CGO_ENABLED": "0",
    }  # fmt: skip
    compiler = str(go / "bin/go")
    reflect = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(reflect)
    shutil.copytree(work / "unpacked/usr/share/gocode/src/github.com/modern-go/reflect2", reflect)
    print("building the generator of the API's description", flush=True)
    generator = str(work / "openapi-gen")
    _run([compiler, "build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, env)
    _run(
        [generator, "--logtostderr", "-i", ",".join(_described(source)), "-O", "zz_generated.openapi",
         "-p", "k8s.io/kubernetes/pkg/generated/openapi", "-r", str(work / "violations"),
         "-h", "hack/boilerplate/boilerplate.generatego.txt"], source, env,
    )  # fmt: skip
    print(f"building {', '.join(PROGRAMS)}: about 7 minutes on 2 slow cores", flush=True)
    flags = ["-tags", "providerless", "-trimpath", "-ldflags", " ".join(["-s", "-w", *_SET_VERSION])]
    (work / "bin").mkdir()
    packages = [f"./cmd/{name}" for name in PROGRAMS]
    _run([compiler, "build", *flags, "-o", str(work / "bin") + os.sep, *packages], source, env)


def _described(source: Path) -> list[str]:
    """The packages whose types the API describes."""
    found = set[str]()
    for top in ("pkg", "cmd", "staging/src", "vendor/k8s.io/kube-openapi"):
        for file in (source / top).rglob("*.go"):
            if "// +k8s:openapi-gen=" in file.read_text(encoding="utf-8"):
                folder = file.parent.relative_to(source).as_posix()
                found.add("k8s.io/kubernetes/" + folder.replace("staging/src/", "vendor/", 1))
    return sorted(found)


def _run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    ended = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command[:4])} ... failed ({ended.returncode}):\n{ended.stdout}{ended.stderr}"[-4000:]
        )


if __name__ == "__main__":
    sys.exit(main())
