"""The `dlrover-hooks` command: one module for each subcommand, each only parses and prints.

The way in: `main.main`.
"""
