"""The model that ships with the package, its tokenizer and its training recipe.

``python -m msattn.trainer.embedded.recipe`` trains it again.
"""
