"""Requests to the API server of a cluster, with objects as the dictionaries of their JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import urllib3

from dlrover_hooks.errors import KubernetesFailed, MissingExtra, UsageError

if TYPE_CHECKING:
    from kubernetes.dynamic import DynamicClient

Manifest = dict[str, Any]
"""An object of the API, as its JSON."""
CONFLICT, NOT_FOUND = 409, 404
"""HTTP status: the object is of another version, or exists already; there is none."""
CONNECT_S, REQUEST_S = 5.0, 30.0
"""Timeouts of a request. A list of some thousand Pods takes a second."""
CONNECTIONS = 32
"""Kept open; more are opened when more threads send requests."""
_QUIET_S = 15.0
"""The server ends a watch after the time that it was asked for; a connection that lives so much longer is dead."""
_HINT = "is the API server reachable from here, and may this account do that? (kubectl auth can-i)"


class ApiServer:
    """The API server of one cluster, by the official client's connection. Any thread.

    Args:
        context: of the kubeconfig file; None: its current one, or the service account of the Pod that this runs in.
        kubeconfig: file; None: `$KUBECONFIG`, or `~/.kube/config`.

    Raises `MissingExtra` without the package kubernetes, and `UsageError` if no cluster is configured.
    """

    def __init__(self, context: str | None = None, *, kubeconfig: str | None = None) -> None:
        self._client = _client(context, kubeconfig)
        self.url: str = self._client.configuration.host

    def get(self, path: str, **query: Any) -> Manifest:
        """The object or list at `path`, such as "/api/v1/namespaces/default/pods". `query`: see `DynamicClient`."""
        return self._call("get", path, None, query)

    def create(self, path: str, body: Mapping[str, Any], **query: Any) -> Manifest:
        """Create an object in the collection at `path`."""
        return self._call("post", path, body, query)

    def replace(self, path: str, body: Mapping[str, Any], **query: Any) -> Manifest:
        """Replace the object at `path`. With `metadata.resourceVersion` only if it is still of that version."""
        return self._call("put", path, body, query)

    def patch(self, path: str, body: Mapping[str, Any], **query: Any) -> Manifest:
        """Change the fields of the object at `path` that `body` has (a JSON merge patch)."""
        return self._call("patch", path, body, {"content_type": "application/merge-patch+json", **query})

    def delete(
        self, path: str, *, grace_s: int | None = None, uid: str | None = None, version: str | None = None
    ) -> Manifest:
        """Delete the object at `path`, only if it has this `uid` and this `version`.

        `grace_s`: seconds that the processes of a Pod have to end; None: as the Pod says.
        """
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        wanted = {name: value for name, value in (("uid", uid), ("resourceVersion", version)) if value is not None}
        if wanted:
            body["preconditions"] = wanted
        return self._call("delete", path, body, {})

    def ensure(self, collection: str, body: Mapping[str, Any]) -> None:
        """Create an object, unless there is one of its name, which may be one that is just being deleted."""
        try:
            self.create(collection, body)
        except KubernetesFailed as error:
            if error.code != CONFLICT:
                raise

    def discard(self, path: str, uid: str) -> None:
        """Delete the object of this `uid`, if it is still there."""
        try:
            self.delete(path, uid=uid)
        except KubernetesFailed as error:
            if error.code not in (NOT_FOUND, CONFLICT):
                raise

    @contextlib.contextmanager
    def watch(self, path: str, version: str, within_s: int, **query: Any) -> Iterator[urllib3.BaseHTTPResponse]:
        """The changes of the collection at `path` after `version`: a stream of JSON lines, which ends after `within_s`.

        Its method `shutdown` ends it on another thread. Raises `KubernetesFailed`: `code` 410 if `version` is too old.
        """
        response = self._send(
            "get", path, None, query | {"watch": True, "resource_version": version, "timeout_seconds": within_s},
            within_s + _QUIET_S,
        )  # fmt: skip
        try:
            yield response
        finally:
            response.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.client.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any]) -> Manifest:
        response = self._send(method, path, body, query, REQUEST_S)
        try:
            return json.loads(response.data)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise self._away(method, path, error) from error

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any], read_s: float
    ) -> urllib3.BaseHTTPResponse:
        from kubernetes.client.exceptions import ApiException

        try:
            return self._client.request(
                method, path, body=body, serialize=False, query_params=[], header_params={},
                _request_timeout=(CONNECT_S, read_s), **query,
            )  # fmt: skip
        except ApiException as error:
            if not error.status:
                raise self._away(method, path, error) from error
            raise _refused(method, path, error.status, error.body) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away(method, path, error) from error

    def _away(self, method: str, path: str, error: Exception) -> KubernetesFailed:
        what = f"The API server at {self.url} gave no answer to {method.upper()} {path}"
        return KubernetesFailed(f"{what} ({type(error).__name__}: {error}).", hint=_HINT)


class _NoDiscovery:
    """Paths are known here; the discovery of `DynamicClient` asks for all of them, and writes a file."""

    def __init__(self, client: object, cache_file: object) -> None:
        del client, cache_file


def _client(context: str | None, kubeconfig: str | None) -> DynamicClient:
    try:
        from kubernetes import client, config, dynamic
    except ImportError as error:
        raise MissingExtra(
            "Kubernetes needs the package kubernetes", hint="pip install 'dlrover-hooks[kubernetes]'"
        ) from error
    found = client.Configuration()
    try:
        config.load_kube_config(kubeconfig, context, found)
    except config.ConfigException as error:
        if context is not None or kubeconfig is not None:
            raise UsageError(f"no such Kubernetes cluster: {error}", hint="kubectl config get-contexts") from error
        try:
            config.load_incluster_config(found)
        except config.ConfigException:
            hint = "set KUBECONFIG, or run in a Pod"
            raise UsageError(f"no Kubernetes cluster is configured: {error}", hint=hint) from error
    found.connection_pool_maxsize = CONNECTIONS
    found.retries = False  # pyright: ignore[reportAttributeAccessIssue]
    return dynamic.DynamicClient(client.ApiClient(found), discoverer=_NoDiscovery)


def _refused(method: str, path: str, status: int, body: bytes | str | None) -> KubernetesFailed:
    """With the message of the server's `Status`."""
    try:
        found = json.loads(body or b"{}")
        message = str(found["message"]) if isinstance(found, dict) and "message" in found else str(body)
    except ValueError:
        message = str(body)
    return KubernetesFailed(f"{method.upper()} {path}: {message} (HTTP {status})", hint=_HINT, code=status)
