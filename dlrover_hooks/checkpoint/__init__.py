"""Checkpoints in memory, on a peer and in storage, from the trainer's side to the files; without frameworks' loops.

The way in: `checkpointer.Checkpointer`. Its packages, each importing only later ones: `keeper`, `save`, `restore`,
`replication`, `ipc`, `storage`, `tensors`, `memory`, `state`.
"""
