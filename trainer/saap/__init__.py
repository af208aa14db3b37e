"""SAAP: k-means of keys, query classifiers that route over the buckets, and the jobs that train both.

Import :class:`~msattn.trainer.saap.kmeans.KMeans` and :class:`~msattn.trainer.saap.qmodel.QModel`. Never imports ``seer``.
"""
