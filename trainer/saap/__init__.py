"""SAAP: k-means of keys, query classifiers that route over the buckets, and their training.

Import :class:`~msattn.trainer.saap.kmeans.KMeans` and :class:`~msattn.trainer.saap.qmodel.QModel`. Never imports ``seer``.
"""
