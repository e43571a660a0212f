"""Python state as tagged JSON and named tensors, both stored as safetensors bytes. Pure: no I/O, no torch.

Start here: `pytree` for state, `safetensors_layout` and `safetensors_header` for bytes.
"""
