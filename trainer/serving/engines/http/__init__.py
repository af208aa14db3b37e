"""An OpenAI-compatible HTTP server over transformers' continuous batching (``msattn serve``).

``app`` has the routes; ``engine`` passes requests to the manager of transformers, with a paged KV
cache sized by ``cache_size``. Both run in separate threads, which ``supervisor`` watches until a
signal or a fault ends them. ``bodies`` checks requests, ``text`` converts prompts to tokens and new
tokens to text, ``answers`` are the response objects, and ``metrics`` counts.

Import from the modules. :mod:`msattn.trainer.commands.serve` imports them after checking for the
extra ``serve``.
"""
