"""The tables. `migrations` makes them; both must agree, which a test checks.

Times are seconds since 1970. Structs are JSON; what is searched for has columns of its own.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

Key = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only in a column of type INTEGER."""
Number = Float(53)
metadata = MetaData()
UNFINISHED = "state in ('open', 'claimed')"

job = Table(
    "job",
    metadata,
    Column("id", Key, primary_key=True),
    Column("name", String(256), nullable=False),
    Column("owner", String(256), nullable=False),
    Column("script_hash", String(256), nullable=False),
    Column("model_size", BigInteger, nullable=False),
    Column("registration", JSON, nullable=False),
    Column("registered_at", Number, nullable=False),
    Column("sampled_at", Number),
    Column("look_at", Number, nullable=False),
    Column("ended_at", Number),
    Column("succeeded", Boolean),
    Column("usage", JSON),
    Column("curve", JSON),
    Index("job_running", "name", unique=True, sqlite_where=text("ended_at is null"),
          postgresql_where=text("ended_at is null")),
    Index("job_alike", "script_hash", "owner", "model_size"),
)  # fmt: skip
"""`look_at`: when its administer looks at it again. One row with `ended_at` null for each name."""

job_sample = Table(
    "job_sample",
    metadata,
    Column("id", Key, primary_key=True),
    Column("job_id", Key, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("at", Number, nullable=False),
    Column("speed", Number, nullable=False),
    Column("ps", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("nodes", JSON, nullable=False),
    Index("job_sample_of_job", "job_id", "id"),
)

optimize_event = Table(
    "optimize_event",
    metadata,
    Column("id", Key, primary_key=True),
    Column("job_id", Key, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("stage", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    Column("oom_nodes", JSON, nullable=False),
    Column("config", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Number, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("claimed_by", String(256)),
    Column("claim_deadline", Number),
    Column("finished_at", Number),
    Column("decision", Text, nullable=False),
    Column("error", Text, nullable=False),
    Index("optimize_event_unfinished", "job_id", "kind", unique=True, sqlite_where=text(UNFINISHED),
          postgresql_where=text(UNFINISHED)),
    Index("optimize_event_state", "state", "id"),
    Index("optimize_event_of_job", "job_id", "kind", "id"),
)  # fmt: skip
"""At most one unfinished event of a kind for each job. `decision`: what came of it; `error`: of algorithms that gave no
answer."""

resource_plan = Table(
    "resource_plan",
    metadata,
    Column("id", Key, primary_key=True),
    Column("job_id", Key, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("event_id", Key, ForeignKey("optimize_event.id", ondelete="CASCADE"), nullable=False, unique=True),
    Column("stage", String(32), nullable=False),
    Column("algorithm", String(256), nullable=False),
    Column("reason", Text, nullable=False),
    Column("plan", JSON, nullable=False),
    Column("predicted", Number),
    Column("sample_id", Key),
    Column("made_at", Number, nullable=False),
    UniqueConstraint("job_id", "number"),
)
"""`sample_id`: the newest sample that the algorithm saw."""

cluster_sample = Table(
    "cluster_sample",
    metadata,
    Column("id", Key, primary_key=True),
    Column("at", Number, nullable=False),
    Column("platform", String(64), nullable=False),
    Column("view", JSON, nullable=False),
    Index("cluster_sample_at", "at"),
)
