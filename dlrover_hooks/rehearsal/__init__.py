"""A user's script, run as it is and under faults, and the runs compared.

The way in: `dlrover-hooks rehearse`.
"""
