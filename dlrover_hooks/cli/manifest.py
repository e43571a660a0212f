"""`dlrover-hooks manifest`: what a Kubernetes cluster needs for `ElasticJob`s, as YAML for kubectl."""

from __future__ import annotations

import sys

import click

from dlrover_hooks.errors import HooksError, MissingExtra, UsageError

_USAGE = 78


@click.command(short_help="Print what a Kubernetes cluster needs, as YAML.")
@click.option("--image", help="Image of the operator: any in which `pip install 'dlrover-hooks[kubernetes]'` was done.")
@click.option("--namespace", default="dlrover-hooks", show_default=True, help="Of the operator. It is created.")
@click.option("--job-namespace", multiple=True, metavar="NAMESPACE",
              help="Masters of jobs get an account here; may be repeated. The namespace must exist. Default: that of "
              "--only, or default.")  # fmt: skip
@click.option("--only", metavar="NAMESPACE",
              help="The operator follows, and may change, only the jobs of this namespace. Default: those of the whole "
              "cluster.")  # fmt: skip
@click.option("--di-policy", type=click.Choice(["pack", "spread", "goodput"]),
              help="The operator also runs the DIJobs of DI-engine, and places the preemptible ones so. Prints the "
              "di-server, too.")  # fmt: skip
@click.option("--brain", is_flag=True, help="Also the account of a Brain with --monitor kubernetes, in --namespace.")
@click.option("--definitions", is_flag=True, help="Only the definitions of ElasticJob, ScalePlan and DIJob.")
def manifest(
    image: str | None, namespace: str, job_namespace: tuple[str, ...], only: str | None,
    di_policy: str | None, brain: bool, definitions: bool,
) -> None:  # fmt: skip
    """Print the definitions of ElasticJob, ScalePlan and DIJob, the operator, and the accounts with the rights that the
    operator and the masters of jobs need.

    \b
    dlrover-hooks manifest --image registry.example/train:1 | kubectl apply -f -
    dlrover-hooks manifest --definitions | kubectl apply -f -

    Exit codes: 0 done, 78 wrong options.
    """
    from dlrover_hooks.kubernetes import custom_resources
    from dlrover_hooks.master.di_orchestrator import di_job_resource
    from dlrover_hooks.master.operator import manifests

    try:
        objects = [*custom_resources.definitions(), di_job_resource.definition()]
        if not definitions:
            if image is None:
                raise UsageError(
                    "the operator needs --image",
                    hint="one with dlrover-hooks[kubernetes], such as that of your training",
                )
            if di_policy is not None and only is not None:
                raise UsageError("DIJobs need the nodes of the whole cluster", hint="leave out --only or --di-policy")
            objects += manifests.operator_objects(namespace, image, only, di_policy=di_policy)
            if di_policy is not None:
                objects += manifests.di_server_objects(namespace, image)
            if brain:
                objects += manifests.brain_objects(namespace)
            for one in sorted(set(job_namespace)) or [only or "default"]:
                objects += manifests.job_namespace_objects(one)
        click.echo(_yaml(objects), nl=False)
    except HooksError as error:
        click.echo(f"dlrover-hooks manifest: {error}", err=True)
        sys.exit(_USAGE)


def _yaml(objects: list[dict[str, object]]) -> str:
    """Raises MissingExtra."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra(
            "manifest needs the package PyYAML", hint="pip install 'dlrover-hooks[kubernetes]'"
        ) from error

    class Dumper(yaml.SafeDumper):
        """Writes each object out, also one that is there twice."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=120)
