"""Jobs of several roles in virtual time: the real PrimeMaster, SubMasters and HTTP master, simulated nodes and workers.

Entry points: `roles_world.simulate_roles`, `make simulate-roles`.
"""
