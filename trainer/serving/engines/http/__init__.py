"""An HTTP server in the form of OpenAI's API, over transformers' continuous batching (``msattn serve``).

``app`` has the routes, ``engine`` hands requests to the manager of transformers, over a paged KV cache that ``cache`` sizes.
Both run in threads of their own, which ``supervisor`` watches until a signal or a fault ends them.
``bodies`` checks what a request asks for, ``text`` makes tokens of its prompt, and text of new tokens, ``answers`` are the
objects that are sent, ``metrics`` counts.

Import from the modules. :mod:`msattn.trainer.commands.serve` imports them, once it has looked for the extra ``serve``.
"""
