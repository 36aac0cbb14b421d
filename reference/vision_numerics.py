"""Every rounding or choice in which public implementations of the vision tower differ, as one value.

The first three only move roundings. The others choose: with them two implementations differ in float64 too, so they are
constants of the model that is meant, at every dtype. Source: vision specification, sections 2.1, 3.2, 5, 6 and 11.
"""

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from reference.errors import ConfigError
from reference.numerics import Numerics


@dataclass(frozen=True)
class VisionNumerics:
    """Field by field: what may differ, then the two or three values that exist."""

    # RMSNorm: multiply by the weight in float32 and round once, or round, multiply by the weight, round again.
    rms_norm_rounding: Literal["once", "twice"] = "once"
    # Attention core: float32 inside with one rounding of the output, or scores and probabilities rounded as well.
    attention_rounding: Literal["once", "each_op"] = "once"
    # SwiGLU: silu(gate) * up rounded once, or silu(gate) rounded before the product.
    swiglu_rounding: Literal["once", "twice"] = "once"
    # Σ w · expert(x): in float32; rounded after each product and sum; weights rounded too, then divided by their sum.
    expert_combine: Literal["float32", "activation", "divided"] = "float32"
    # RoPE: angles, cos and sin in float32, or each rounded to bfloat16, an error of up to 0.2 rad at 144 patches.
    rope_table: Literal["float32", "bfloat16"] = "float32"
    # The router's bias as it is stored, or rounded to bfloat16 together with the rest of the tower.
    router_bias: Literal["float32", "bfloat16"] = "float32"
    # Added to the sum of the chosen scores before it divides them. Shows where both scores are below 1e-6.
    weight_floor: float = 1e-20

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(VisionNumerics).items():
            allowed, value = get_args(hint), getattr(self, name)
            if allowed and value not in allowed:
                raise ConfigError(
                    f"vision numerics: {name!r} must be {' or '.join(map(repr, allowed))}, found {value!r}"
                )

    @property
    def of_norms(self) -> Numerics:
        """The same choice for the norms that the tower shares with the text model."""
        return Numerics(rms_norm_rounding=self.rms_norm_rounding)

    @classmethod
    def preset(cls, name: str) -> "VisionNumerics":
        """`default`, `transformers` (5.24, eager attention and experts, bit for bit) or `vllm` (0.33, without fp8).

        Raises: ConfigError for another name.
        """
        if name not in PRESETS:
            raise ConfigError(f"no vision numerics preset {name!r}; there are {', '.join(PRESETS)}")
        return PRESETS[name]


PRESETS = {
    "default": VisionNumerics(),
    "transformers": VisionNumerics(
        rms_norm_rounding="twice",
        attention_rounding="each_op",
        swiglu_rounding="twice",
        expert_combine="activation",
    ),
    "vllm": VisionNumerics(
        rms_norm_rounding="twice",
        swiglu_rounding="twice",
        expert_combine="divided",
        rope_table="bfloat16",
        router_bias="bfloat16",
        weight_floor=1e-9,
    ),
}
