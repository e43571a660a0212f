"""What a node, its processes and a rank's accelerator use: sampled here, sent by the launcher's agent and by workers.

Nothing here steers training: what cannot be read is None in `dlrover_hooks/protocol/vitals_messages.py`. The ways in
are `node_reports` for the launcher, `accelerators` for a worker.
"""
