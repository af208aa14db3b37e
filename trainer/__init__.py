"""Everything around a model: loading, data, training, artifacts, attaching, evaluation. Imports ``kernels``, never the reverse."""
