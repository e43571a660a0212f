"""Jobs of several roles: which process is to hold each rank, and what follows when one ends.

Entry points: `role_requests` (messages), `role_state` (what is kept), `failure_policies` (what follows).
"""
