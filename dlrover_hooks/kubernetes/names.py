"""Names and labels of the objects of a job."""

from __future__ import annotations

import hashlib
import re

JOB_LABEL = "elasticjob-name"
"""DLRover's labels, so that its users find their Pods as before."""
TYPE_LABEL = "replica-type"
INDEX_LABEL = "replica-index"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER, OPERATOR = "dlrover-hooks", "dlrover-hooks-operator"
"""Values of `MANAGED_BY`: of the Pods of nodes; of the masters of jobs, and what belongs to them."""
MASTER_TYPE = "dlrover-master"
"""Of the master's Pod, where others have a `NodeType`."""
NODE_ANNOTATION = "dlrover-hooks/node"
"""The `Node` of a Pod, as JSON."""
LAUNCH_ANNOTATION = "dlrover-hooks/launch"
"""Which scaler has created a Pod, and in which of its launches."""
LIFE_ANNOTATION = "dlrover-hooks/scaler"
"""Which scaler has written a `ScalePlan`."""
MOST = 63
"""Characters of a label's value and of a host name (RFC 1123)."""
_HASH = 8


def label_value(text: str) -> str:
    """`text` as the value of a label; another text never becomes the same value. Without change if it is one."""
    return text if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", text) and len(text) <= MOST else _cut(text)


def object_name(*parts: str) -> str:
    """The name of an object that is also a host name: `parts` with "-" between them, if they can be one."""
    text = "-".join(parts)
    return text if re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", text) and len(text) <= MOST else _cut(text)


def master_name(job: str) -> str:
    """Of the Pod and the Service of this job's master."""
    return object_name(job, "master")


def service_host(name: str, namespace: str) -> str:
    """By which Pods find a Service, where the cluster has DNS."""
    return f"{name}.{namespace}.svc"


def _cut(text: str) -> str:
    """Its letters and digits, and a hash of the whole."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower())[: MOST - _HASH - 1].strip("-") or "x"
    return f"{kept}-{hashlib.sha256(text.encode()).hexdigest()[:_HASH]}"
