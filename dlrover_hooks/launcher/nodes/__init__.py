"""`dlrover-hooks run --mode`: the nodes of a job whose number the master plans, each an agent process on this machine.

Entry point: `NodeHost`.
"""
