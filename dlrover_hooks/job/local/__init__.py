"""The backend `local`: the masters and workers of a job are processes on this machine.

Entry points: `local_job.LocalJob`, `host` (the parent process of all others).
"""
