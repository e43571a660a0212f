"""Run by alembic: upgrades the database of the connection that it was given, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from dlrover_hooks.master.brain.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
