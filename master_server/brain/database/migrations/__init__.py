"""The revisions of the tables, for alembic. Entry point: `env.py`, which alembic runs."""
