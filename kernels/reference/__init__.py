"""Reference implementation of every operation in plain PyTorch, in a module of its name; those of
multi-token attention are in ``msattn.kernels.multi_token.reference``.

References are written to be read. They process inputs in chunks to bound memory, and are the
``"torch"`` backend, the default for CPU tensors. The operations have checked their arguments;
references check values that these do not read: padding, lengths, probes, offsets, bucket numbers,
zooms.
"""
