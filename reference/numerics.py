"""Every rounding or choice in which public implementations of NOTE differ, as one value.

In float64 with all choices at `default` none of the roundings matters; they decide which bits a bfloat16 run gives.
Two implementations are only compared under the same `Numerics`. Source: text_model specification, sections 5, 7, 11,
17.4, 18 and 19.
"""

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch

from reference.errors import ConfigError

RopeDtype = Literal["float32", "rounded_table", "activation"]


@dataclass(frozen=True)
class Numerics:
    """Field by field: what may differ, then the two or three values that exist."""

    # Router GEMM: in float32, or with its logits rounded to the activation dtype (the sigmoid is float32 in both).
    router_dtype: Literal["float32", "activation"] = "float32"
    # RMSNorm: multiply by the weight in float32 and round once, or round, multiply by the weight, round again.
    rms_norm_rounding: Literal["once", "twice"] = "once"
    # sqrt(D/rank) on a latent: inside the norm's float32 region, or as a multiplication of its own with a rounding.
    rescale_rounding: Literal["fused", "separate"] = "fused"
    # cos/sin and rotation in float32; table rounded to the activation dtype, rotation in float32; both rounded.
    rope_full: RopeDtype = "float32"
    rope_sliding: RopeDtype = "float32"
    # Attention core: float32 inside with one rounding of the output, or scores and probabilities rounded as well.
    attention_rounding: Literal["once", "each_op"] = "once"
    # Keys and values expanded from the latent, or the query absorbed into the latent space (equal without rounding).
    attention_form: Literal["expanded", "absorbed"] = "expanded"
    # Output gate: sigmoid kept in float32 until the product is rounded, or rounded to the activation dtype first.
    gate_rounding: Literal["once", "twice"] = "once"
    # SwiGLU: silu(gate) * up rounded once, or silu(gate) rounded before the product.
    swiglu_rounding: Literal["once", "twice"] = "once"
    # Index queries and keys: rounded after RoPE, or rotated lanes left in float32 (and cached so).
    index_dtype: Literal["activation", "float32"] = "activation"
    # fp8 (e4m3, one power-of-two scale a head) on index queries and keys, without or with a Hadamard rotation.
    index_quantization: Literal["none", "fp8", "hadamard_fp8"] = "none"
    # Smallest absolute maximum that the fp8 scale is derived from.
    index_amax_floor: float = 1e-4
    # Sum over the chosen experts: in float32 with one rounding, or rounded after each product and each addition.
    expert_accumulation: Literal["float32", "activation"] = "float32"
    # Draft layer: zero the token embedding at position 0 (before its norm).
    mtp_mask_position_0: bool = False
    # Which lanes of an index head are rotated when the checkpoint does not say: leading, tail, or refuse to guess.
    missing_indexer_rope_layout: Literal["refuse", "leading", "tail"] = "refuse"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Numerics).items():
            allowed, value = get_args(hint), getattr(self, name)
            if allowed and value not in allowed:
                raise ConfigError(f"numerics: {name!r} must be {' or '.join(map(repr, allowed))}, found {value!r}")

    @classmethod
    def preset(cls, name: str) -> "Numerics":
        """`default`, `transformers` (5.24, eager attention and experts, bit for bit) or `vllm` (0.33, its choices).

        Raises: ConfigError for another name.
        """
        if name not in PRESETS:
            raise ConfigError(f"no numerics preset {name!r}; there are {', '.join(PRESETS)}")
        return PRESETS[name]


PRESETS = {
    "default": Numerics(),
    "transformers": Numerics(
        rms_norm_rounding="twice",
        rescale_rounding="separate",
        rope_sliding="activation",
        attention_rounding="each_op",
        gate_rounding="twice",
        swiglu_rounding="twice",
        index_dtype="float32",
        expert_accumulation="activation",
        missing_indexer_rope_layout="leading",
    ),
    "vllm": Numerics(
        router_dtype="activation",
        rescale_rounding="separate",
        rope_full="rounded_table",
        rope_sliding="rounded_table",
        gate_rounding="twice",
        index_quantization="fp8",
        index_amax_floor=1e-10,
        mtp_mask_position_0=True,
        missing_indexer_rope_layout="leading",
    ),
}


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a "float32 region": float32 for bfloat16 and float32, float64 for float64.

    One rule makes the same code the bfloat16 model, the float32 model and, in float64, the truth.
    """
    return torch.promote_types(dtype, torch.float32)
