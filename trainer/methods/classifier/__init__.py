"""SAAP: k-means of keys, query classifiers that route over the buckets, and the jobs that train
both.

Import :class:`~msattn.trainer.methods.classifier.kmeans.KMeans` and
:class:`~msattn.trainer.methods.classifier.qmodel.QModel`. Never imports ``gate``.
"""
