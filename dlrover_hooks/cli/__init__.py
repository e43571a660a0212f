"""The `dlrover-hooks` command: one module per subcommand. They only parse arguments and print.

Entry point: `main.main`.
"""
