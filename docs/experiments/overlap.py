"""Compares training texts with held-out ones; the check of docs/measurements.md, "The embedded
model".

    python docs/experiments/overlap.py TRAIN... --heldout TEST...

Each argument is a text file, a folder or a glob. Prints how many of the sampled windows of the
held-out texts are also in the training texts. Exit code 0 without one, 1 with some, 2 for a path
that cannot be read.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import chain

from msattn.trainer.data.overlap import SAMPLED, WINDOW, shared_windows
from msattn.trainer.data.sources import local_documents
from msattn.trainer.errors import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = ArgumentParser(description="Compare texts.")
    parser.add_argument("train", nargs="+", help="training texts: files, folders or globs")
    parser.add_argument(
        "--heldout", nargs="+", required=True, help="texts that training must not see"
    )
    args = parser.parse_args(arguments)
    train = chain.from_iterable(local_documents("train", path) for path in args.train)
    heldout = chain.from_iterable(local_documents("--heldout", path) for path in args.heldout)
    shared, total = shared_windows(train, heldout)
    print(
        f"{shared:,} of {total:,} windows of {WINDOW} characters are also in the training texts "
        f"(one in {SAMPLED} sampled)"
    )
    return 1 if shared else 0


if __name__ == "__main__":
    run_program(main)
