"""A trainer's saves: when, into which memory, at once or overlapped with the step. Never imports the keeper.

Entry points: `slot_writer` for arrays, `overlapped_writer` for torch.
"""
