"""Checkpoints in the released layout: what they hold, and reading, writing, making and cutting them.

Reading order: `expected` (which tensors a config asks for; `expected_towers`), `accounting` (their sums), `problems`,
`header`, `index`, `verify` and `folder` (what is refused before any tensor is read), `selection`, `load`; then
`shards`, `write`, `recipes` (`recipes_towers`), `synthetic` and `slice`.
"""

from reference.checkpoint.accounting import Accounting, BucketTotal, LayerClass, account
from reference.checkpoint.expected import BUCKETS, Bucket, ExpectedTensor, expected_tensors
from reference.checkpoint.folder import CheckpointFolder
from reference.checkpoint.load import drop_layer, empty_text_model, load_into, load_layer, load_text_model
from reference.checkpoint.selection import Selection, Source
from reference.checkpoint.slice import cut_slice
from reference.checkpoint.synthetic import synthetic_tensor, synthetic_tensors, write_synthetic
from reference.checkpoint.write import CheckpointWriter, write_checkpoint

__all__ = [
    "BUCKETS",
    "Accounting",
    "Bucket",
    "BucketTotal",
    "CheckpointFolder",
    "CheckpointWriter",
    "ExpectedTensor",
    "LayerClass",
    "Selection",
    "Source",
    "account",
    "cut_slice",
    "drop_layer",
    "empty_text_model",
    "expected_tensors",
    "load_into",
    "load_layer",
    "load_text_model",
    "synthetic_tensor",
    "synthetic_tensors",
    "write_checkpoint",
    "write_synthetic",
]
