"""The cases of all functions of kernels, by name."""

from tests.kernels.cases import buckets, decoding, gates, layers, paged, prefill

CASES = prefill.CASES | decoding.CASES | buckets.CASES | gates.CASES | paged.CASES | layers.CASES
