"""Training of the models that experiments use: the embedded model and the lab teacher, each by one command from text.

``python -m msattn.trainer.recipes.teachers.train --plan embedded`` or ``--plan lab``.
"""
