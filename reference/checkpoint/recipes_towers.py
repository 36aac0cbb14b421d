"""What synthetic tower weights look like: the same idea as for the text (`recipes`), without outlier channels.

    vision   stream from the patch norm, each sublayer adds 0.4 of it; attention logits of deviation 2 through the
             query and key norms; router logits 1.5; adapter output like a text embedding
    audio    convolutions that keep the variance; attention logits of deviation 2; adapter output like a text embedding

Source: vision specification, section 2; audio specification, sections 6 and 7; checkpoint specification, 4 and 5.
"""

import math

import numpy as np
from numpy.typing import NDArray

from reference.checkpoint.expected import ExpectedTensor
from reference.checkpoint.expected_towers import AUDIO_ADAPTER, SPEECH, VISION
from reference.checkpoint.recipes import (
    CORE,
    SILU,
    SPREAD,
    STREAM,
    Normal,
    NormWeight,
    Recipe,
    RouterBias,
    norm_mean,
)
from reference.config import NoteConfig

# Standard deviation of a LayerNorm's bias in units of its weight's mean, of other biases, and of a sublayer's output
# in units of the stream.
NORM_BIAS, BIAS, SHARE = 0.3, 0.1, 0.4
# Query and key norms of this mean give attention logits of deviation 1.4² · 13/12 = 2.1.
QK_MEAN = 1.4
# Root mean square of gelu(1.3 x), x normal.
GELU = 0.88


def tower_recipe(tensor: ExpectedTensor, config: NoteConfig, seed: int, gains: NDArray[np.float64]) -> Recipe:
    """`gains` are those of the text's residual stream, into which the adapters write."""
    if tensor.bucket == "vision":
        return _vision(tensor, config, seed, gains)
    return _audio(tensor, seed, gains)


def _behind(seed: int, norm: str, width: int, bias: float = 0.0) -> float:
    """Weights that turn `width` normed values into unit outputs."""
    return 1 / (norm_mean(seed, norm) * math.sqrt((SPREAD + bias * bias) * width))


def _vision(tensor: ExpectedTensor, config: NoteConfig, seed: int, gains: NDArray[np.float64]) -> Recipe:
    assert config.vision
    name = tensor.name.removesuffix(".weight")
    fan_in = math.prod(tensor.shape[1:])
    stream = norm_mean(seed, f"{VISION}patch_embed.norm")
    if name.endswith("router_bias"):
        return RouterBias()
    if name.endswith((".q_norm", ".k_norm")):
        return NormWeight(QK_MEAN)
    if name.startswith(f"{VISION}adapter"):
        before = _behind(seed, f"{VISION}adapter.ln_q", fan_in, NORM_BIAS)
        return _adapter(name, f"{VISION}adapter.", ("ln_q", "mlp.0", "mlp.2"), before, fan_in, seed, gains)
    if name.endswith("norm") or "norm_" in name:
        return NormWeight(norm_mean(seed, name))
    if name.startswith(f"{VISION}patch_embed"):
        return Normal(BIAS if name.endswith(".bias") else 1 / math.sqrt(fan_in))
    block = ".".join(name.split(".")[:3])
    if name.endswith("qkv"):
        return Normal(_behind(seed, f"{block}.norm_1", fan_in))
    if name.endswith("attn.proj"):
        return Normal(SHARE * stream / (CORE * math.sqrt(fan_in)))
    if name.endswith("fc2"):
        chosen = config.vision.num_experts_per_tok if ".experts." in name else 1
        return Normal(SHARE * stream * math.sqrt(chosen / fan_in) / SILU)
    unit = {"fc1": 1.3, "fc3": 1.0, "gate_weight": 1.5}[name.rpartition(".")[2]]
    return Normal(unit * _behind(seed, f"{block}.norm_2", fan_in))


def _audio(tensor: ExpectedTensor, seed: int, gains: NDArray[np.float64]) -> Recipe:
    name = tensor.name.removesuffix(".weight")
    fan_in = math.prod(tensor.shape[1:])
    if name.startswith(AUDIO_ADAPTER):
        before = _behind(seed, f"{AUDIO_ADAPTER}0", fan_in, NORM_BIAS)
        return _adapter(name, AUDIO_ADAPTER, ("0", "1", "3"), before, fan_in, seed, gains)
    if name.endswith("layer_norm"):
        return NormWeight(norm_mean(seed, name))
    if name.endswith(".bias"):
        return Normal(BIAS)
    if name.startswith(f"{SPEECH}conv"):
        return Normal(math.sqrt(2 / fan_in))
    layer = name[: name.index(".", len(f"{SPEECH}layers."))]
    if name.endswith(("out_proj", "fc2")):
        return Normal(SHARE / ((CORE if name.endswith("out_proj") else SILU) * math.sqrt(fan_in)))
    norm = "self_attn_layer_norm" if ".self_attn." in name else "final_layer_norm"
    unit = 1.0 if name.endswith("v_proj") else 1.4 if ".self_attn." in name else 1.2
    return Normal(unit * _behind(seed, f"{layer}.{norm}", fan_in))


def _adapter(
    name: str,
    prefix: str,
    parts: tuple[str, str, str],
    before: float,
    fan_in: int,
    seed: int,
    gains: NDArray[np.float64],
) -> Recipe:
    """LayerNorm, linear, GELU, linear into the text's stream; each with a bias. `parts` are their three names."""
    norm, first, last = (prefix + part for part in parts)
    if name == norm:
        return NormWeight(norm_mean(seed, norm))
    if name == f"{norm}.bias":
        return Normal(NORM_BIAS * norm_mean(seed, norm))
    if name == first:
        return Normal(1.3 * before)
    if name == last:
        return Normal(STREAM / (GELU * math.sqrt(fan_in)) * gains)
    return Normal(BIAS if name == f"{first}.bias" else BIAS * STREAM)
