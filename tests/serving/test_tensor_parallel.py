"""attach on a model that transformers divides among two ranks (``tp_plan="auto"``): as on the whole
model.
"""

from pathlib import Path

import pytest

from tests.factory import tiny_model
from tests.jobs import Job

SCRIPT = """
import sys
import warnings
import torch
from transformers import AutoModelForCausalLM
from msattn.trainer.serving.attach import attach
from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.untrained.routers.quest import QuestBlocks
from msattn.trainer.methods.selection import Selection
from tests.factory import random_partition, random_tokens
from tests.methods.gate.random_gates import config, decode_config, noisy_gate, random_decode_gate

warnings.simplefilter("ignore")
whole, divided = (AutoModelForCausalLM.from_pretrained(sys.argv[1], **plan).eval() for plan in ({},
    {"tp_plan": "auto"}))
torch.manual_seed(0)
gate = noisy_gate(config(), std=0.3).requires_grad_(False)
decode_gate = random_decode_gate(decode_config(qk_norm=True))
classifier = QModel(random_partition(), 2, 8).requires_grad_(False).eval()
classifier.thresholds = KeyThresholds([0.1], [1.2])
window = {"recent": 8, "sink": 1, "dense_layers": ()}
attached = {
    "quest": {"select": {"scores": "quest", "block_size": 16, "sparsity": 0.5}},
    "gate": {"gate": gate, "select": {"sparsity": 0.5}},
    "k-means": {"qmodel": random_partition(), "probes": 2, "independent": True, **window},
    "classifier": {"qmodel": classifier, "keys": 0.1, **window},
    "decode gate": {"qmodel": decode_gate, "probes": 3, **window},
    "pages": {"qmodel": QuestBlocks(6, [0, 1], 2), "probes": 2, **window},
}
ids = random_tokens(1, 150)


def generate(model, options):
    with attach(model, dense_below=0, **options) as sparse:
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True,
        "max_new_tokens": 3}
        first = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        ids_of_second = torch.cat([first.sequences, ids[:, :20]], dim=1)
        options |= {"past_key_values": first.past_key_values,
        "attention_mask": torch.ones_like(ids_of_second)}
        second = model.generate(ids_of_second, **options)
        stats = sparse.stats()
        assert (stats["sparsity"] or 0) > 0.2 or (stats["selectivity"] or 1) < 0.9, stats
        return torch.stack([*first.logits, *second.logits])


with torch.no_grad():
    for name, options in attached.items():
        torch.testing.assert_close(generate(divided, options), generate(whole, options), rtol=1e-4,
            atol=1e-4, msg=name)
    try:
        with attach(divided, select=Selection.from_config(SelectConfig(), gate)):
            pass
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    printed = Job(SCRIPT, tmp_path, tmp_path / "model", processes=2).output()
    assert (
        "select: a Selection with a gate cannot be divided among ranks; give gate= and a "
        "SelectConfig" in printed
    )
