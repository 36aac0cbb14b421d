"""Dots3 NOTE as a definition: pure PyTorch, eager, one idea a file.

Reading order: `config` (`config_json`, `json_reader`), `numerics`, `probe`, `layers/norm`, `layers/rope`,
`layers/indexer` (`layers/index_quantization`), `layers/attention`, `layers/mla`, `layers/mlp`, `layers/moe`, `cache`,
`text`, `session`, `sampling`, `generate`; then `checkpoint`. Beside the text model: `vision`, `audio`, and `media/`,
which makes their inputs from files; `model` (`model_media`, `model_scatter`, `model_load`, `model_tiny`), which joins
all three; `prompt` (chat to token ids) and `tool_calls` (text to calls).
"""

# By this name `optimized` and `parity` know that no folder called `reference` stands in our place.
DISTRIBUTION = "note-parity"
