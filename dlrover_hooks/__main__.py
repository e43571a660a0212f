"""`python -m dlrover_hooks` is the `dlrover-hooks` command."""

from dlrover_hooks.cli.main import main

main()
