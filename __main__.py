"""``python -m msattn``: the same as ``msattn``."""

from msattn.cli import main

if __name__ == "__main__":
    main()
