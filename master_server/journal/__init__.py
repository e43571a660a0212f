"""Where the master's events are stored, a SQLite file or etcd, and which of several masters leads.

Every journal is a `journal_protocol.Journal`, every election a `leadership.Leadership`. The decisions that the events
record are made in the package `core`.
"""
