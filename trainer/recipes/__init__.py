"""Programs that are run by name, as ``python -m msattn.trainer.recipes.<program>``, and that
nothing else imports.

They measure what docs/measurements.md reports, train the embedded model and download public models.
Experiments that need no program of their own are options of the group ``experiment`` in ``conf/``.
"""

from argparse import ArgumentParser


def argument_parser(program: str, purpose: str) -> ArgumentParser:
    return ArgumentParser(prog=f"python -m msattn.trainer.recipes.{program}", description=purpose)
