"""The durable tree at `save_to`: files, MANIFESTs, generations, retention, and the claim on a URL. No torch.

Entry point: `generations`.
"""
