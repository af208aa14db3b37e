"""Trained artifacts: the shipped gate and query classifier of the embedded model, on a fact that is
hidden in text.
"""

import inspect
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import msattn

tokenizer = AutoTokenizer.from_pretrained(msattn.EMBEDDED)
model = AutoModelForCausalLM.from_pretrained(msattn.EMBEDDED)
lines = inspect.getsource(json.decoder).splitlines(keepends=True)[:300]
fact = " The secret number of amber falcon is 48213. "
question = "The secret number of amber falcon is"
prompt = tokenizer(
    "".join([*lines[:40], fact, *lines[40:]]) + question,
    return_tensors="pt",
    return_token_type_ids=False,
)


def answer(**artifacts: object) -> str:
    """Returns what the model generates after the prompt, with dense attention if there are no
    artifacts.
    """
    if not artifacts:
        output = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        read = "every key"
    else:
        # dense_below=0: sparse at this length, too, at which dense attention is faster.
        with msattn.attach(model, **artifacts, dense_below=0) as sparse:
            output = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        stats = sparse.stats()
        read = f"{1 - stats['sparsity']:.0%} of the blocks"
        read += (
            f", {stats['selectivity']:.0%} of the keys in decoding"
            if stats["selectivity"] is not None
            else ""
        )
    return f"{tokenizer.decode(output[0, prompt.input_ids.shape[1] :])}   (reads {read})"


with torch.no_grad():
    print(f"{prompt.input_ids.shape[1]} tokens, then: {question} ...")
    print("dense:                ", answer())
    print("gate and classifier:  ", answer(gate="embedded", sparsity=0.8, qmodel="embedded"))
    print("random blocks:        ", answer(select="random", sparsity=0.8))
