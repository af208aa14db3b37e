"""Needles between the lines of natural text, which seldom repeats an earlier fact."""

import hashlib
from collections import deque

import numpy as np

from msattn.trainer.data.tasks.exercises import random_key, random_value
from msattn.trainer.data.tasks.wordings import TRAINING

MIN_DISTANCE = 350  # characters between two insertions
WINDOW = 16  # recent facts that may be repeated
Fact = tuple[str, str]  # a statement, and a question with its answer


def inject_needles(text: str, name: str) -> str:
    """Inserts facts, drawn from ``name``, between the lines of ``text``: half of them new, half
    repetitions of recent ones.

    A repetition is the statement again, or a question and its answer.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    recent: deque[Fact] = deque(maxlen=WINDOW)
    pieces: list[str] = []
    distance = 0
    for line in text.splitlines(keepends=True):
        pieces.append(line)
        distance += len(line)
        if distance >= MIN_DISTANCE:
            distance = 0
            if not recent or rng.random() < 0.5:
                wording = TRAINING[rng.integers(len(TRAINING))]
                key = random_key(rng)
                value = random_value(rng)
                recent.append((wording.state(key, value), f"{wording.ask([key], 1)} {value}."))
                pieces.append(f" {recent[-1][0]} ")
            else:
                pieces.append(f" {recent[rng.integers(len(recent))][rng.integers(2)]} ")
    return "".join(pieces)
