"""A tiny config that has every bucket, and ways to damage a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference.checkpoint.index import INDEX_FILE
from reference.config import AudioConfig, NoteConfig, VisionConfig, tiny


def tiny_with_towers() -> NoteConfig:
    """`tiny()` with both towers. The vision tower has two dense blocks, then 2 and 4 experts."""
    text = tiny()
    vision = VisionConfig(
        embed_dim=48,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=40,
        moe_intermediate_size=20,
        num_channels=3,
        patch_size=4,
        spatial_merge_size=2,
        rms_norm_eps=1e-5,
        experts=(0, 0, 2, 4),
        num_experts_per_tok=2,
        adapter_out_dim=96,
    )
    audio = AudioConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=56,
        num_mel_bins=16,
        max_source_positions=200,
        downsample_hidden_size=6,
        sampling_rate=16000,
        chunk_seconds=60,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        adapter_out_dim=96,
    )
    return NoteConfig(
        text.text,
        vision,
        audio,
        text.bos_token_id,
        text.eos_token_ids,
        text.pad_token_id,
        text.image_token_id,
        text.video_token_id,
        text.audio_token_id,
    )


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a shard; the tensor bytes stay."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
