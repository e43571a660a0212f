"""`dlrover-hooks run`: one agent per node, its decisions when a worker fails, and the end of a run.

It does not import torch. Entry point: `node_supervisor.Launcher`.
"""
