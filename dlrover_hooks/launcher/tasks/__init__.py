"""`dlrover-hooks run --ps`: the tasks of a parameter server job on this machine, as the master lists them.

Entry point: `TaskSupervisor`.
"""
