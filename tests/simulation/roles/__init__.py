"""Jobs of several roles in virtual time: real PrimeMaster, SubMasters and HTTP master; simulated nodes and workers.

Entry points: `roles_world.simulate_roles`, `make simulate-roles`.
"""
