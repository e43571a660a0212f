"""Fixtures of the tests of `ElasticJob`s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.job_cluster import Cluster


@pytest.fixture
def bare_cluster() -> Iterator[Cluster]:
    """Without an operator."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def cluster(bare_cluster: Cluster) -> Cluster:
    bare_cluster.start_operator()
    return bare_cluster
