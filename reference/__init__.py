"""Dots3 NOTE as a definition: pure PyTorch, eager, one idea a file.

Reading order: `config` (`config_json`, `json_reader`), `numerics`, `probe`, `layers/norm`, `layers/rope`,
`layers/indexer` (`layers/index_quantization`), `layers/attention`, `layers/mla`, `layers/mlp`, `layers/moe`, `cache`,
`text`, `session`; then `checkpoint`.
"""

# By this name `optimized` and `parity` know that no folder called `reference` stands in our place.
DISTRIBUTION = "note-parity"
