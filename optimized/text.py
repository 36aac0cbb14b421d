"""The text model over one step of a ragged batch.

The residual stream and what a sublayer adds to it travel apart until the next norm joins them in one kernel:
h, x = add_norm(h, f(x)). What is added may still be in parts, which the same kernel adds up. Everything named in the
probe schema is shown under the reference's names.
Source: text_model specification, sections 1, 11 and 12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.attention.front import LayerContext
from optimized.attention.full import FullPools, full_attention
from optimized.attention.sliding import sliding_attention
from optimized.cache import CachePools
from optimized.device import Ops
from optimized.kernels.parts import Parts, whole
from optimized.moe import moe_parts
from optimized.observe import BatchObserver
from optimized.rope import RopeTables, Rotation
from optimized.step import DeviceStep
from optimized.weights import LayerWeights, PackedText
from reference.config import TextConfig
from reference.probe import is_observed, scope

# T tokens  D model  W vocabulary


class Text:
    """All layers on one device: packed weights, pools, and the chosen ops."""

    def __init__(self, config: TextConfig, weights: PackedText, pools: CachePools, ops: Ops):
        self.config, self.weights, self.pools, self.ops = config, weights, pools, ops
        self.rope = RopeTables(config, pools.device)

    def hidden(self, step: DeviceStep, see: BatchObserver, embeddings_TD: Tensor | None = None) -> Tensor:
        """The step's rows through all layers; returns the state after the final norm, [T, D].

        `embeddings_TD`, of the first rows, stand for what the table has for their ids.
        """
        eps, weights = self.config.rms_norm_eps, self.weights
        first_norm_D = weights.layers[0].input_norm_D
        embedded = self.ops.embed(
            weights.embeddings_WD, step.token_ids_T, first_norm_D, eps, step.positions_T, self.rope.lanes
        )
        rotation, normed_TD = self.rope.of(embedded.rotation_TX), embedded.normed_TD
        hidden_TD = embedded.hidden_TD
        if embeddings_TD is not None:
            hidden_TD = torch.cat((embeddings_TD, hidden_TD[len(embeddings_TD) :]))
        hidden_TD = see("embeddings", hidden_TD)
        if hidden_TD is not embedded.hidden_TD:
            normed_TD = self.ops.rms_norm(hidden_TD, first_norm_D, eps)
        delta: Parts | None = None
        for index, layer in enumerate(weights.layers):
            if delta is not None:
                hidden_TD, normed_TD = self._output(index - 1, hidden_TD, delta, layer.input_norm_D, see)
            with scope(f"layers.{index}"):
                hidden_TD, delta = self.layer(index, layer, hidden_TD, normed_TD, step, rotation, see)
        assert delta is not None
        _, normed_TD = self._output(len(weights.layers) - 1, hidden_TD, delta, weights.final_norm_D, see)
        return see("final_norm", normed_TD)

    def logits(self, normed_TD: Tensor) -> Tensor:
        """[T, W] in the activation dtype."""
        return self.ops.product(normed_TD, self.weights.head_WD)

    def layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden_TD: Tensor,
        normed_TD: Tensor,
        step: DeviceStep,
        rotation: Rotation,
        see: BatchObserver,
    ) -> tuple[Tensor, Parts]:
        """Returns the residual stream behind the attention, and what the feed-forward adds to it.

        `normed_TD` is the layer's input after its first norm. The draft layer has the index behind the last one.
        """
        eps, is_full = self.config.rms_norm_eps, self.config.is_full(index)
        see.only("input", hidden_TD)
        with scope("attn"):
            normed_TD = see("input", normed_TD)
            context = LayerContext(
                self.config,
                self.config.geometry(index),
                layer.attention,
                self.ops,
                see,
                rotation.full_TR if is_full else rotation.sliding_TR,
            )
            if is_full:
                pools = FullPools(self.pools.latent_pool(index), self.pools.index_pool(index))
                attended_STD = full_attention(normed_TD, context, pools, step)
            else:
                attended_STD = sliding_attention(normed_TD, context, self.pools.ring_pool(index), step)
        hidden_TD, normed_TD = self.ops.add_parts_rms_norm(hidden_TD, attended_STD, layer.post_norm_D, eps)
        with scope("ffn"):
            normed_TD = see("input", normed_TD)
            delta = self._feed_forward(layer, normed_TD, see)
            if is_observed():
                delta = Parts(see("output", whole(delta.parts_STX, hidden_TD.dtype))[None])
        return hidden_TD, delta

    def _feed_forward(self, layer: LayerWeights, x_TD: Tensor, see: BatchObserver) -> Parts:
        if layer.dense is not None:
            act_TF = self.ops.product_swiglu(x_TD, layer.dense.gate_up_XD)
            return Parts(self.ops.product_parts(act_TF, layer.dense.down_DF))
        assert layer.experts is not None
        delta, observed = moe_parts(x_TD, layer.experts, self.config, self.ops, is_observed())
        if observed is not None:
            with scope("router"):
                see.only("logits", observed.logits_TE)
                see.only("scores", observed.scores_TE)
                see.only("choice", observed.choice_TE)
                see.only("expert_ids", observed.expert_ids_TK.long())
                see.only("weights", observed.weights_TK)
            see.only("routed", observed.routed_TD)
            if observed.shared_TD is not None:
                see.only("shared", observed.shared_TD)
        return delta

    def _output(
        self, index: int, hidden_TD: Tensor, delta: Parts, norm_D: Tensor, see: BatchObserver
    ) -> tuple[Tensor, Tensor]:
        """Join the stream and what layer `index` adds; returns the layer's output and its norm."""
        hidden_TD, normed_TD = self.ops.add_parts_rms_norm(
            hidden_TD, delta.parts_STX, norm_D, self.config.rms_norm_eps, delta.weights_TK
        )
        with scope(f"layers.{index}"):
            see.only("output", hidden_TD)
        return hidden_TD, normed_TD
