"""The revisions of the tables, for alembic. Entry point: the module `env`, which alembic runs."""
