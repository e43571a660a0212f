"""`dlrover-hooks manifest`: what it prints can be applied; tests/kubernetes/test_elastic_job.py applies it."""

from __future__ import annotations

from typing import Any

import click
import yaml
from click.testing import CliRunner

from dlrover_hooks.cli.main import main
from dlrover_hooks.cli.manifest import manifest
from dlrover_hooks.master.operator.__main__ import DI_POLICIES


def printed(*words: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(main, ["manifest", *words])
    assert found.exit_code == 0, found.output
    assert "&id" not in found.output, "no anchors"
    return list(yaml.safe_load_all(found.output))


def kinds(objects: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in objects]


def test_only_the_definitions() -> None:
    assert kinds(printed("--definitions")) == [
        ("CustomResourceDefinition", "", "elasticjobs.elastic.iml.github.io"),
        ("CustomResourceDefinition", "", "scaleplans.elastic.iml.github.io"),
        ("CustomResourceDefinition", "", "dijobs.diengine.opendilab.org"),
    ]


def test_an_operator_of_the_whole_cluster() -> None:
    found = printed("--image", "mine:1", "--job-namespace", "b", "--job-namespace", "a")
    operator, master = "dlrover-hooks-operator", "dlrover-hooks-master"
    assert kinds(found)[3:] == [
        ("Namespace", "", "dlrover-hooks"), ("ServiceAccount", "dlrover-hooks", operator),
        ("ClusterRole", "", operator), ("ClusterRoleBinding", "", operator),
        ("Role", "dlrover-hooks", f"{operator}-leader"), ("RoleBinding", "dlrover-hooks", f"{operator}-leader"),
        ("Deployment", "dlrover-hooks", operator),
        *((kind, name, master) for name in "ab" for kind in ("ServiceAccount", "Role", "RoleBinding")),
    ]  # fmt: skip
    (container,) = found[9]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mine:1"


def test_an_operator_of_one_namespace_has_no_rights_elsewhere() -> None:
    found = printed("--image", "mine:1", "--only", "train", "--namespace", "train")
    assert not [kind for kind, _, _ in kinds(found) if kind.startswith("ClusterRole")]
    assert {namespace for kind, namespace, _ in kinds(found) if "Role" in kind} == {"train"}
    (container,) = next(one for one in found if one["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--namespace", "train"]


def test_without_an_image_it_says_what_it_needs() -> None:
    found = CliRunner().invoke(main, ["manifest"])
    assert found.exit_code == 78
    assert "the operator needs --image" in found.output


def test_di_jobs_have_an_operator_with_their_rights_and_a_server_that_only_they_reach() -> None:
    found = printed("--image", "mine:1", "--di-policy", "pack")
    server = "dlrover-hooks-di-server"
    assert [kind for kind, _, name in kinds(found) if name == server] == [
        "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment", "Service", "NetworkPolicy",
    ]  # fmt: skip
    by_kind = {one["kind"]: one for one in found if one["metadata"]["name"] == server}
    (rule,) = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {
        "diengine/operator": "dlrover-hooks-operator"}}}]  # fmt: skip
    (operator,) = [one for one in found if one["kind"] == "Deployment" and one["metadata"]["name"] != server]
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[-4:] == ["--di-policy", "pack", "--di-server", f"http://{server}.dlrover-hooks.svc:8080"]
    resources = {
        name for one in found if one["kind"] == "ClusterRole" for rule in one["rules"] for name in rule["resources"]
    }
    assert {"dijobs", "dijobs/status", "nodes"} <= resources
    without = printed("--image", "mine:1")
    assert "dijobs" not in str([one for one in without if one["kind"] == "ClusterRole"])
    refused = CliRunner().invoke(main, ["manifest", "--image", "a", "--di-policy", "pack", "--only", "b"])
    assert (refused.exit_code, "the nodes of the whole cluster" in refused.output) == (78, True)


def test_the_account_of_a_brain() -> None:
    found = printed("--image", "mine:1", "--brain")
    (role,) = [
        one for one in found if one["kind"] == "ClusterRole" and one["metadata"]["name"] == "dlrover-hooks-brain"
    ]
    assert {(name, tuple(rule["verbs"])) for rule in role["rules"] for name in rule["resources"]} == {
        ("nodes", ("list", "watch")), ("pods", ("list", "watch")),
    }  # fmt: skip


def test_the_policies_are_those_of_the_operator() -> None:
    (option,) = [one for one in manifest.params if one.name == "di_policy"]
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == list(DI_POLICIES)
