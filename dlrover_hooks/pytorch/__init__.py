"""What any torch training needs: the loop's driver, state dicts, weighted gradients, checkpoints read and written.

It knows no framework above torch. The way in: `async_checkpointer.AsyncCheckpointer`.
"""
