"""The model that ships with the package, its tokenizer, its artifacts and its training recipe.

``python -m msattn.trainer.embedded.recipe`` trains the model again, and the commands in ``docs/measurements.md`` the gates,
k-means and query classifiers in ``artifacts/`` (one folder of each kind, found as ``embedded``).
"""
