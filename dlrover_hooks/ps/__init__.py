"""Parameter server jobs, without TensorFlow: membership of a process, shards of the data, and kinds of errors.

Entry points: `ChiefMembership` for the chief, `ServerMembership` for parameter servers and workers.
"""
