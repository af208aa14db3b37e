"""The model that ships with the package, its tokenizer and its artifacts.

``model/training.json`` holds the plan that ``docs/experiments/embedded_model.py`` trained it by.
The commands in ``docs/measurements.md`` train the gates, k-means and query classifiers in
``artifacts/`` (one folder of each kind, found as ``embedded``).
"""

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "model"
