"""An HTTP server in the form of OpenAI's API, over transformers' continuous batching (``msattn serve``).

``app`` has the routes, ``engine`` hands requests to the manager of transformers, over a paged KV cache that ``cache`` sizes.
Both run in threads of their own, which ``supervisor`` watches until a signal or a fault ends them.
``bodies`` checks what a request asks for, ``prompts`` makes tokens of it, ``text`` turns new tokens into text, ``answers`` and
``errors`` are the objects that are sent, ``metrics`` counts.

Import from the modules. :mod:`msattn.trainer.commands.serve` imports them. FastAPI, uvicorn and prometheus-client are the extra
``serve``, imported where they are used.
"""
