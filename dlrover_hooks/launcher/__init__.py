"""`dlrover-hooks run`: one agent for each node, what it decides when a worker fails, and how it ends.

It loads no torch. The way in: `launcher.Launcher`.
"""
