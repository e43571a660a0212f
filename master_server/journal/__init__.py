"""Where the master's events are stored: a SQLite file for one master, etcd for several of which one leads.

Every journal is a `journal_protocol.Journal`. The decisions that the events record are made in the package `core`.
"""
