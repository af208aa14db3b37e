"""Forward passes of a decoder on a GPU that are launched as CUDA graphs, or with fewer kernels.

``capture`` holds the tensors of a decoding step and captures it, and says which passes cannot be
captured; ``steps`` replaces the decoder's passes over single tokens, and ``prompt_graphs`` those
over short prompts. ``fused`` has the modules of the decoder whose kernels are fused.

Import from the modules.
"""
