"""One module for each revision, in order of their numbers. Entry point: alembic reads all of them."""
