"""The backend `local`: the masters and workers of a job as processes of this machine.

Entry points: `local_job.LocalJob`, `host` (the process that owns all others).
"""
