"""`torchrun --rdzv-backend=dlrover`: torchrun's rendezvous and store, kept by the master.

The way in: `entry_point.get_handler`, which torch finds by itself.
"""
