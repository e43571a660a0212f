"""A trainer's saves: when, into which memory, at once or overlapped with the step. It never imports the keeper.

The way in: `slot_writer` for arrays, `overlapped_writer` for torch.
"""
