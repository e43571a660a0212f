"""`python -m dlrover_hooks.integrations.tensorflow`: a parameter server or a worker, see `server`."""

from __future__ import annotations

import os
import sys

from dlrover_hooks.integrations.tensorflow.server import main

if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the server's threads would keep the interpreter waiting
