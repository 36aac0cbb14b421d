"""The vision tower a second time, in numpy float64, as an oracle for the reference.

Written from the specification alone and, where a formula allows it, another way than one would first choose: patches
are placed by the formula of their row number, RoPE multiplies complex numbers, attention runs head by head, experts run
patch by patch, choices are full sorts by (-score, id). One frame at a time; named values go under their probe names.

The one rounding of the definition is the RoPE angle, the float32 product of coordinate and float32 frequency.
Source: vision specification, sections 2 to 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from reference.config import VisionConfig

Array = np.ndarray
Weights = Mapping[str, Array]


def frame(weights: Weights, config: VisionConfig, pixels: Array, height: int, width: int) -> dict[str, Array]:
    """All named values of a frame of height x width patches, in the order of computation. `pixels` [T, X]."""
    seen: dict[str, Array] = {"pixels": pixels}
    kernel = weights["patch_embed.proj.weight"]
    seen["patch_proj"] = pixels @ kernel.reshape(len(kernel), -1).T + weights["patch_embed.proj.bias"]
    x = seen["patches"] = _rms(seen["patch_proj"], weights["patch_embed.norm.weight"], config.rms_norm_eps)
    head = config.embed_dim // config.num_attention_heads
    seen["rope.angles"] = _angles(height, width, config.spatial_merge_size, head)
    for index, experts in enumerate(config.experts):
        own = {
            name.removeprefix(f"blocks.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{index}.")
        }
        named: dict[str, Array] = {"input": x}
        x = x + _attention(own, config, x, seen["rope.angles"], named)
        named["ffn.input"] = _rms(x, own["norm_2.weight"], config.rms_norm_eps)
        dense_or_sparse = _experts if experts else _dense
        named["ffn.output"] = dense_or_sparse(own, config, named["ffn.input"], named)
        x = named["output"] = x + named["ffn.output"]
        seen |= {f"blocks.{index}.{name}": value for name, value in named.items()}
    seen["trunk"] = _rms(x, weights["post_trunk_norm.weight"], config.rms_norm_eps)
    return seen | _merged(weights, config, seen["trunk"])


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _angles(height: int, width: int, merge: int, head: int) -> Array:
    """The row number of patch (y, x), from the specification, says where its angles go."""
    quarter = head // 4
    frequency = np.float32(1) / np.power(
        np.float32(10000), np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
    )
    angles = np.zeros((height * width, 2 * quarter), dtype=np.float32)
    for y in range(height):
        for x in range(width):
            square = (y // merge) * (width // merge) + x // merge
            row = square * merge**2 + (y % merge) * merge + x % merge
            angles[row] = np.concatenate((np.float32(y) * frequency, np.float32(x) * frequency))
    return angles.astype(np.float64)


def _attention(own: Weights, config: VisionConfig, x: Array, angles: Array, named: dict[str, Array]) -> Array:
    named["attn.input"] = _rms(x, own["norm_1.weight"], config.rms_norm_eps)
    heads, half = config.num_attention_heads, angles.shape[1]
    q, k, v = (
        (named["attn.input"] @ third.T).reshape(len(x), heads, -1)
        for third in own["attn.qkv.weight"].reshape(3, config.embed_dim, config.embed_dim)
    )
    turn = np.exp(1j * angles)[:, None]
    for name, lanes in (("q", q), ("k", k)):
        normed = _rms(lanes, own[f"attn.{name}_norm.weight"], config.rms_norm_eps)
        turned = (normed[..., :half] + 1j * normed[..., half:]) * turn
        named[f"attn.{name}"] = np.concatenate((turned.real, turned.imag), axis=-1)
    named["attn.v"] = v
    core = np.zeros_like(v)
    for h in range(heads):
        scores = named["attn.q"][:, h] @ named["attn.k"][:, h].T / math.sqrt(2 * half)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        core[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h]
    named["attn.core"] = core
    named["attn.output"] = core.reshape(len(x), -1) @ own["attn.proj.weight"].T
    return named["attn.output"]


def _swiglu(x: Array, own: Weights, prefix: str) -> Array:
    gate, up = x @ own[f"{prefix}fc1.weight"].T, x @ own[f"{prefix}fc3.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ own[f"{prefix}fc2.weight"].T


def _dense(own: Weights, config: VisionConfig, x: Array, named: dict[str, Array]) -> Array:
    return _swiglu(x, own, "mlp.")


def _experts(own: Weights, config: VisionConfig, x: Array, named: dict[str, Array]) -> Array:
    logits = x @ own["mlp.gate_weight"].T
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + own["mlp.router_bias"]
    K = min(config.num_experts_per_tok, choice.shape[1])
    ids = np.array([sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:K] for row in choice])
    chosen = np.take_along_axis(scores, ids, axis=1)
    weights = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
    for name, value in (
        ("logits", logits),
        ("scores", scores),
        ("choice", choice),
        ("expert_ids", ids),
        ("weights", weights),
    ):
        named[f"ffn.router.{name}"] = value
    output = np.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            output[row] += weight * _swiglu(x[row : row + 1], own, f"mlp.experts.{expert}.")[0]
    return output


def _merged(weights: Weights, config: VisionConfig, trunk: Array) -> dict[str, Array]:
    centred = trunk - trunk.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    normed = normed * weights["adapter.ln_q.weight"] + weights["adapter.ln_q.bias"]
    square = config.spatial_merge_size**2
    grouped = np.stack([np.concatenate(normed[row : row + square]) for row in range(0, len(normed), square)])
    linear = grouped @ weights["adapter.mlp.0.weight"].T + weights["adapter.mlp.0.bias"]
    hidden = linear * 0.5 * (1 + np.vectorize(math.erf)(linear / math.sqrt(2)))
    merged = hidden @ weights["adapter.mlp.2.weight"].T + weights["adapter.mlp.2.bias"]
    return {"merger.normed": normed, "merger.grouped": grouped, "merger.hidden": hidden, "merged": merged}
