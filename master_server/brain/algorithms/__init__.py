"""The algorithms that come with the Brain: pure functions of a job, finished jobs and the cluster.

Entry point: `registry.BUILT_IN`.
"""
