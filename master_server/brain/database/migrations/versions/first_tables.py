"""The first tables: jobs, their samples, optimize events, plans, samples of the cluster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NUMBER = sa.Float(53)


def _of_job() -> sa.Column[int]:
    return sa.Column("job_id", _KEY, sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False)


def upgrade() -> None:
    """Make them."""
    _job()
    _job_sample()
    _optimize_event()
    _resource_plan()
    op.create_table(
        "cluster_sample",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("at", _NUMBER, nullable=False),
        sa.Column("platform", sa.String(64), nullable=False),
        sa.Column("view", sa.JSON, nullable=False),
    )
    op.create_index("cluster_sample_at", "cluster_sample", ["at"])


def _job() -> None:
    op.create_table(
        "job",
        sa.Column("id", _KEY, primary_key=True),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("script_hash", sa.String(256), nullable=False),
        sa.Column("model_size", sa.BigInteger, nullable=False),
        sa.Column("registration", sa.JSON, nullable=False),
        sa.Column("registered_at", _NUMBER, nullable=False),
        sa.Column("sampled_at", _NUMBER),
        sa.Column("look_at", _NUMBER, nullable=False),
        sa.Column("ended_at", _NUMBER),
        sa.Column("succeeded", sa.Boolean),
        sa.Column("usage", sa.JSON),
        sa.Column("curve", sa.JSON),
    )
    running = sa.text("ended_at is null")
    op.create_index("job_running", "job", ["name"], unique=True, sqlite_where=running, postgresql_where=running)
    op.create_index("job_alike", "job", ["script_hash", "owner", "model_size"])


def _job_sample() -> None:
    op.create_table(
        "job_sample",
        sa.Column("id", _KEY, primary_key=True),
        _of_job(),
        sa.Column("at", _NUMBER, nullable=False),
        sa.Column("speed", _NUMBER, nullable=False),
        sa.Column("ps", sa.Integer, nullable=False),
        sa.Column("workers", sa.Integer, nullable=False),
        sa.Column("nodes", sa.JSON, nullable=False),
    )
    op.create_index("job_sample_of_job", "job_sample", ["job_id", "id"])


def _optimize_event() -> None:
    op.create_table(
        "optimize_event",
        sa.Column("id", _KEY, primary_key=True),
        _of_job(),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("oom_nodes", sa.JSON, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", _NUMBER, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("claimed_by", sa.String(256)),
        sa.Column("claim_deadline", _NUMBER),
        sa.Column("finished_at", _NUMBER),
        sa.Column("decision", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
    )
    unfinished = sa.text("state in ('open', 'claimed')")
    op.create_index("optimize_event_unfinished", "optimize_event", ["job_id", "kind"], unique=True,
                    sqlite_where=unfinished, postgresql_where=unfinished)  # fmt: skip
    op.create_index("optimize_event_state", "optimize_event", ["state", "id"])
    op.create_index("optimize_event_of_job", "optimize_event", ["job_id", "kind", "id"])


def _resource_plan() -> None:
    op.create_table(
        "resource_plan",
        sa.Column("id", _KEY, primary_key=True),
        _of_job(),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("event_id", _KEY, sa.ForeignKey("optimize_event.id", ondelete="CASCADE"), nullable=False,
                  unique=True),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("algorithm", sa.String(256), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("plan", sa.JSON, nullable=False),
        sa.Column("predicted", _NUMBER),
        sa.Column("sample_id", _KEY),
        sa.Column("made_at", _NUMBER, nullable=False),
        sa.UniqueConstraint("job_id", "number"),
    )  # fmt: skip
