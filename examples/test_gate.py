"""A test that gates a PyTorch implementation of NOTE, here transformers', on CPU: copy it and put your model in.

The golden and the synthetic weights come with note-parity; your implementation reads them as it reads the release.
"""

import torch
from transformers import Dots3NoteForCausalLM
from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteTextConfig

from parity.testing import assert_parity
from reference.checkpoint import write_synthetic
from reference.config import tiny


def test_transformers_agrees_with_note(tmp_path):
    write_synthetic(tmp_path, tiny(), seed=0)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.bfloat16}
    config = Dots3NoteTextConfig.from_pretrained(tmp_path)
    model = Dots3NoteForCausalLM.from_pretrained(tmp_path, config=config, **eager)

    def rows_of(step):
        if step.kind == "draft":
            return {}
        outputs = model(torch.tensor([step.history + step.token_ids]), output_hidden_states=True)
        layers = {f"layers.{index}.input": rows for index, rows in enumerate(outputs.hidden_states[:-1])}
        named = {**layers, "final_norm": outputs.hidden_states[-1], "logits": outputs.logits}
        return {name: rows[0, -len(step.token_ids) :] for name, rows in named.items()}

    assert_parity(rows_of)
