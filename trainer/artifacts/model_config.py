"""The key ``sparse_attention_config`` of a model's ``config.json``, which holds the options of
``msattn.attach``.

It has the format of NVIDIA's Model-Optimizer: groups of settings, each for one algorithm. Readers
ignore unknown groups.
"""

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from msattn.trainer.version import __version__

KEY = "sparse_attention_config"
ALGORITHM = "msattn"
OWN = "."  # instead of a path: the folder or Hub repository of the model itself


def with_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``config.json`` with ``settings`` as the group for msattn; all other keys and
    groups are kept.
    """
    section = config.get(KEY)
    section = dict(section) if isinstance(section, Mapping) else {}
    groups = {name: group for name, group in _groups(section).items() if not _is_own(group)}
    name = next(name for number in count() if (name := f"group_{number}") not in groups)
    groups[name] = {"algorithm": ALGORITHM, "targets": ["Attention"], **settings}
    producer = {"producer": {"name": "msattn", "version": __version__}}
    return {**config, KEY: producer | section | {"config_groups": groups}}


def settings_of(section: Any) -> dict[str, Any] | None:
    """Returns the settings for msattn in the value of the key, which may be of another form; None
    if there are none.
    """
    for group in _groups(section).values():
        if _is_own(group):
            return {
                name: value for name, value in group.items() if name not in ("algorithm", "targets")
            }
    return None


def as_file(config: Mapping[str, Any]) -> bytes:
    """Returns the content of a ``config.json``, as transformers writes it."""
    return (json.dumps(config, indent=2) + "\n").encode()


def _groups(section: Any) -> Mapping[str, Any]:
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    return groups if isinstance(groups, Mapping) else {}


def _is_own(group: Any) -> bool:
    return isinstance(group, Mapping) and group.get("algorithm") == ALGORITHM
