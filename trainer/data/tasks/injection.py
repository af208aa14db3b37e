"""Needles between the lines of natural text, which seldom repeats an earlier fact."""

import hashlib
from collections import deque

import numpy as np

from msattn.trainer.data.tasks.exercises import random_key, random_value
from msattn.trainer.data.tasks.wordings import TRAINING


def inject_needles(text: str, name: str, min_distance: int = 350, window: int = 16) -> str:
    """Inserts facts between the lines of ``text``: half of them new, half questions about recent ones with their answers.

    Parameters
    ----------
    name : seed of the facts.
    min_distance : minimum number of characters between two insertions.
    window : number of most recent facts that are asked for.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    recent: deque[str] = deque(maxlen=window)  # questions with their answers
    pieces: list[str] = []
    distance = 0
    for line in text.splitlines(keepends=True):
        pieces.append(line)
        distance += len(line)
        if distance >= min_distance:
            distance = 0
            if not recent or rng.random() < 0.5:
                wording, key, value = TRAINING[rng.integers(len(TRAINING))], random_key(rng), random_value(rng)
                recent.append(f" {wording.ask([key], 1)} {value}. ")
                pieces.append(f" {wording.state(key, value)} ")
            else:
                pieces.append(recent[rng.integers(len(recent))])
    return "".join(pieces)
