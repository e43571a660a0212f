"""`torchrun --rdzv-backend=dlrover`: torchrun's rendezvous and store, provided by the master.

Entry point: `entry_point.get_handler`, which torch finds by itself.
"""
