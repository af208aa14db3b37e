"""References of the operations of multi-token attention; see :mod:`msattn.kernels.reference`."""
