"""Section F: the sliding window and what the caches of windowed layers keep."""

from parity.faults.fault import Fault, text_edit

WINDOW_FAULTS = (
    Fault(
        "window_512",
        says="the window counts 512 keys with the query, one too few",
        visibility="L",
        first=("layers.{i}.attn.core", "mtp.{s}.attn.core"),
        visible_when="T >= window",
        source="MLX notes; defaults of transformers and SGLang",
        config=lambda config: text_edit(sliding_window_size=config.text.sliding_window_size - 1)(config),
    ),
)
