"""Text sources, chunks of tokens, and retrieval tasks that are mixed into them.

Import :func:`chunks`, :func:`documents` and their classes from here; import retrieval tasks from
:mod:`~msattn.trainer.data.tasks` and :mod:`~msattn.trainer.data.mixture`. Nothing here loads a
model.
"""
# ruff: noqa: F401 (names for import from here)

from msattn.trainer.data.chunking import Chunks, chunks, encode, training_chunks, warn_of_repeats
from msattn.trainer.data.sources import Document, documents
