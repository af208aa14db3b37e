"""Multi-token attention: scores mixed over queries and keys (``conv_attention``, and its decoding
step ``conv_decode``) or over heads (``head_mix_attention``).

One module or folder an operation, their references in ``reference/``. Only ``trainer/mta``, the
public API and the benchmarks import them.
"""
