"""Retrieval tasks: their wordings, texts (exercises), token sequences, and needles in training
text.
"""
