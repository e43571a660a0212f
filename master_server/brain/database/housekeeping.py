"""What is deleted, and when."""

from __future__ import annotations

import sqlalchemy as sa

from dlrover_hooks.master.brain.database.tables import cluster_sample, job

FORGET_S = 365 * 86400.0
"""A finished job is history for plans of new ones so long."""
LOST_S = 7 * 86400.0
"""A job without samples for so long has ended without saying so."""
CLUSTER_S = 7 * 86400.0
"""Samples of the cluster are kept so long."""


def forget(connection: sa.Connection, now: float, forget_s: float) -> None:
    """Delete finished jobs with all that belongs to them, and old samples of the cluster; end jobs that are lost."""
    seen = sa.func.coalesce(job.c.sampled_at, job.c.registered_at)
    lost = job.c.ended_at.is_(None) & (seen < now - LOST_S)
    connection.execute(sa.update(job).where(lost).values(ended_at=now, succeeded=False))
    connection.execute(sa.delete(job).where(job.c.ended_at < now - forget_s))
    connection.execute(sa.delete(cluster_sample).where(cluster_sample.c.at < now - CLUSTER_S))
