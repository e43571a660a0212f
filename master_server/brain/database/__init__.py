"""The Brain's tables, how they are made and upgraded, and the statements on them. Entry point: `database.Database`."""
