"""Jobs of several roles: which process holds each rank, and what happens when a process ends.

Entry points: `role_requests` (messages), `role_state` (the state of a job), `failure_policies` (ends of workers).
"""
