"""Needles between the lines of natural text, which seldom repeats an earlier fact."""

import hashlib
from collections import deque

import numpy as np

from msattn.trainer.data.tasks.exercises import random_key, random_value
from msattn.trainer.data.tasks.wordings import KNOWN


def inject_needles(text: str, name: str, min_distance: int = 350, window: int = 16) -> str:
    """Inserts facts between the lines of ``text``: half of them new, half repetitions of recent ones.

    Parameters
    ----------
    name : seed of the facts.
    min_distance : minimum number of characters between two insertions.
    window : number of most recent facts from which repetitions are drawn.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    recent: deque[str] = deque(maxlen=window)
    pieces: list[str] = []
    distance = 0
    for line in text.splitlines(keepends=True):
        pieces.append(line)
        distance += len(line)
        if distance >= min_distance:
            distance = 0
            if not recent or rng.random() < 0.5:
                recent.append(KNOWN.state(random_key(rng), random_value(rng)))
                pieces.append(f" {recent[-1]} ")
            else:
                pieces.append(f" {recent[rng.integers(len(recent))]} ")
    return "".join(pieces)
