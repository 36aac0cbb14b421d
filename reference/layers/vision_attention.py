"""Attention among the patches of one frame: every patch sees every other, in both directions.

q, k, v = the three thirds of x W_qkvᵀ, each head by head
q, k    = rope(rms(q)), rope(rms(k))        the norm first, over one head, with one weight for all heads
o       = softmax(q kᵀ / sqrt(J)) v · W_projᵀ

Rotation: a head of J lanes has J/2 angles, the first half y · f_i, the second x · f_i, with f_i = 10000^(-4i/J). Lane j
and lane j + J/2 are a pair, turned by angle j. So height comes first, both axes have the same frequencies, and pairs
are halves of a head apart, unlike the text model's neighbours.
Source: vision specification, sections 3.2 and 4.
"""

import torch
from torch import Tensor, nn

from reference.config import VisionConfig
from reference.layers import rope
from reference.layers.attention import attend
from reference.layers.norm import RMSNorm
from reference.numerics import at_least_float32
from reference.probe import probe
from reference.vision_numerics import VisionNumerics

# T patches of one frame  D tower width  H heads  J head dim  P = J/2 pairs of lanes

THETA = 10000.0
# Bounds the scores of a group of heads: a frame of 5,184 patches has 107 MB of them a head in float32.
WORKSPACE_BYTES = 2**30


def axial_angles(coordinates_T2: Tensor, head_dim: int) -> Tensor:
    """Radians, float32 [T, J/2]: those of the row, then those of the column."""
    return torch.cat([rope.angles(axis_T, THETA, head_dim // 2) for axis_T in coordinates_T2.unbind(1)], dim=-1)


class VisionRope:
    """Turns [T, H, J] queries or keys by the angles of their patches; float32 inside, one rounding."""

    def __init__(self, numerics: VisionNumerics):
        self._cos_sin = _wide if numerics.rope_table == "float32" else _of_bfloat16_table

    def __call__(self, x_THJ: Tensor, angles_TP: Tensor) -> Tensor:
        wide = at_least_float32(x_THJ.dtype)
        cos_TP, sin_TP = self._cos_sin(angles_TP, wide)
        return rope.rotate_halves(x_THJ.to(wide), cos_TP[:, None], sin_TP[:, None]).to(x_THJ.dtype)


def _wide(angles_TP: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    angles_TP = angles_TP.to(wide)
    return angles_TP.cos(), angles_TP.sin()


def _of_bfloat16_table(angles_TP: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """What comes of casting a whole tower, its table of angles included: rounded angles, then rounded cos and sin."""
    angles_TP = angles_TP.to(torch.bfloat16)
    return angles_TP.cos().to(wide), angles_TP.sin().to(wide)


class VisionAttention(nn.Module):
    """[T, D] to [T, D] for one frame."""

    def __init__(self, config: VisionConfig, numerics: VisionNumerics):
        super().__init__()
        D, eps = config.embed_dim, config.rms_norm_eps
        self.heads = config.num_attention_heads
        head_dim = D // self.heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.q_norm = RMSNorm(head_dim, eps, numerics.of_norms)
        self.k_norm = RMSNorm(head_dim, eps, numerics.of_norms)
        self.rope = VisionRope(numerics)
        self.each_op = numerics.attention_rounding == "each_op"

    def forward(self, x_TD: Tensor, angles_TP: Tensor) -> Tensor:
        q_THJ, k_THJ, v_THJ = self.qkv(x_TD).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q_THJ = probe("q", self.rope(self.q_norm(q_THJ), angles_TP))
        k_THJ = probe("k", self.rope(self.k_norm(k_THJ), angles_TP))
        v_THJ = probe("v", v_THJ)
        core_THJ = probe("core", self.core(q_THJ, k_THJ, v_THJ))
        return probe("output", self.proj(core_THJ.flatten(1)))

    def core(self, q_THJ: Tensor, k_THJ: Tensor, v_THJ: Tensor) -> Tensor:
        """softmax(scale · q kᵀ) v, [T, H, J], a group of heads at a time."""
        T = len(q_THJ)
        all_visible_TT = torch.ones(T, T, dtype=torch.bool, device=q_THJ.device)
        # Scores, masked scores, probabilities, and one spare of eight bytes a value.
        group = max(1, WORKSPACE_BYTES // (T * T * 32))
        of_groups = []
        for qkv in zip(*(x_THJ.split(group, dim=1) for x_THJ in (q_THJ, k_THJ, v_THJ)), strict=True):
            q_HTJ, k_HTJ, v_HTJ = (x_THJ.transpose(0, 1) for x_THJ in qkv)
            of_groups.append(attend(q_HTJ, k_HTJ, v_HTJ, all_visible_TT, self.scale, self.each_op))
        return torch.cat(of_groups).transpose(0, 1)
