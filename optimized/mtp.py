"""The draft layer over one step of a ragged batch: one dense sliding layer, driven once for each drafted token.

u = [rms(E_mtp[x[t+1]]) | rms(g[t])] W_ehᵀ;  r = rms(layer(u));  logits for x[t+2] = r · head
g is the hidden state after the final norm, or r of the draft step before. Source: text_model specification, section 17.
"""

from __future__ import annotations

from torch import Tensor

from optimized.errors import NotSupportedError
from optimized.kernels.parts import whole
from optimized.observe import BatchObserver
from optimized.step import DeviceStep
from optimized.text import Text
from reference.probe import is_observed, scope

# T tokens  D model  W vocabulary  B requests


def draft_step(
    number: int, text: Text, hidden_TD: Tensor, step: DeviceStep, last_B: Tensor, see: BatchObserver
) -> tuple[Tensor, Tensor]:
    """Draft step `number` on the rows of `step`, whose token ids are those of the next position.

    Returns the last row of each request, whose numbers are `last_B`: r_BD, the hidden state for a further step, and
    logits_BW. The head runs on other rows only when observed.
    Raises: NotSupportedError for a model without a draft layer.
    """
    weights, config, ops = text.weights.draft, text.config, text.ops
    if weights is None:
        raise NotSupportedError("this model has no draft layer: num_nextn_predict_layers is 0")
    eps = config.rms_norm_eps
    with scope(f"mtp.{number}"):
        eh_T2D, rotation_TX = ops.draft_input(
            weights.embeddings_WD,
            step.token_ids_T,
            hidden_TD,
            weights.enorm_D,
            weights.hnorm_D,
            eps,
            step.positions_T,
            text.rope.lanes,
        )
        fused_STD = ops.product_parts(see("eh_input", eh_T2D), weights.eh_X2D)
        if is_observed():
            fused_STD = see("fused", whole(fused_STD, hidden_TD.dtype))[None]
        fused_TD, normed_TD = ops.add_parts_rms_norm(None, fused_STD, weights.layer.input_norm_D, eps)
        rotation = text.rope.of(rotation_TX)
        stream_TD, delta = text.layer(config.num_hidden_layers, weights.layer, fused_TD, normed_TD, step, rotation, see)
        output_TD, r_TD = ops.add_parts_rms_norm(stream_TD, delta.parts_STX, weights.norm_D, eps, delta.weights_TK)
        see.only("output", output_TD)
        r_TD = see("normed", r_TD)
        if is_observed():
            return r_TD[last_B], see("logits", text.logits(r_TD))[last_B]
        return r_TD[last_B], text.logits(r_TD[last_B])
