"""The algorithms that come with the Brain: pure functions of a job, finished jobs and the cluster.

Entry point: `registry`, the table of them; `registry.problem` says what is wrong with a job.
"""
