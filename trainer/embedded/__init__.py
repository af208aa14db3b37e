"""The small model that ships with the package, its tokenizer, and the recipe that trained both.

Run ``python -m msattn.trainer.embedded.recipe`` to train it again.
"""
