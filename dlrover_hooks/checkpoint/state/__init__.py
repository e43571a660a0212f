"""Python state as tagged JSON and named tensors, and those as safetensors bytes. Pure: no I/O, no torch.

The way in: `pytree` for state, `safetensors_writer` and `safetensors_reader` for bytes.
"""
