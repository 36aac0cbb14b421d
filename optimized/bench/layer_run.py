"""One decoder layer over one planned step, with caches of its own: what the rows of single layers time and check.

The layer runs as it does in the model: from the residual stream and its norm to the stream behind the layer and the
norm that the next layer takes, so that each layer has two norms. Nothing that it writes depends on what it wrote
before, so the same step can run again and again, also from a CUDA graph.

A row of any step is a decode step of its own on the rows that were cached before it (`of_rows`): so a few rows of a
large step can be computed again in float64.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optimized.cache import CachePools
from optimized.device import Ops
from optimized.engine import DEFAULT_LIMITS
from optimized.observe import BatchObserver
from optimized.planning import plan_step
from optimized.step import PlanItem, Uploader
from optimized.text import Text
from optimized.weights import PackedText, empty_text, text_places
from reference.config import TextConfig

# T tokens  D model  B requests  S cached rows  L latent row  J index head dim

# Rings hold so many rows more than a window: of a prompt, so many last rows and one can be run again.
KEPT_ROWS = 7


def layer_alone(config: TextConfig, layer: int) -> TextConfig:
    """A model of this one layer, without a draft layer and with one token in its vocabulary."""
    return dataclasses.replace(
        config,
        num_hidden_layers=1,
        layer_types=(config.layer_types[layer],),
        first_k_dense_replace=0 if config.is_moe(layer) else 1,
        num_nextn_predict_layers=0,
        vocab_size=1,
    )


def drawn_layer(config: TextConfig, generator: torch.Generator, dtype: torch.dtype) -> PackedText:
    """Matrices with a spread of 1 / sqrt of their width, norms about 1, biases so small that experts stay balanced."""
    packed = empty_text(config, generator.device, dtype)
    for name, place in text_places(packed).items():
        for piece in place.pieces:
            if piece.dim() > 1:
                piece.normal_(0.0, piece.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                piece.normal_(0.0, 0.01, generator=generator)
            else:
                piece.normal_(1.0, 0.1, generator=generator)
    return packed


def mapped(weights: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Packed weights, or any part of them, with every floating tensor replaced by `function` of it."""
    if isinstance(weights, Tensor):
        return function(weights) if weights.is_floating_point() else weights
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
        return type(weights)(**{name: mapped(value, function) for name, value in fields.items()})
    if isinstance(weights, tuple):
        values = [mapped(value, function) for value in weights]
        return type(weights)(*values) if hasattr(weights, "_fields") else tuple(values)
    return weights


class LayerRun:
    """`run(hidden_TD, normed_TD)`: the layer on `count` new tokens of each request, which has `seen[b]` tokens cached.

    `config` and `weights` are of a model of this layer alone. The caches hold zeros until they are filled. More than
    one new token is a prompt's, if it is more than KEPT_ROWS + 1.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: PackedText,
        ops: Ops,
        seen: Sequence[int],
        count: int = 1,
        page_size: int = 64,
    ):
        final_D = weights.final_norm_D
        self.config, self.weights, self.ops, self.seen = config, weights, ops, tuple(seen)
        self.requests = tuple(f"request {number}" for number in range(len(seen)))
        self.pools = CachePools(
            config,
            pages=sum(-(-(length + count) // page_size) for length in seen),
            page_size=page_size,
            rings=len(seen),
            max_draft_tokens=KEPT_ROWS,
            dtype=final_D.dtype,
            device=final_D.device,
        )
        for request, length in zip(self.requests, seen, strict=True):
            self.pools.open(request)
            self.pools.grow(request, length)
        items = [PlanItem(request, (0,) * count, "decode" if count == 1 else "prefill") for request in self.requests]
        self.step = Uploader(final_D.device).upload(plan_step(items, self.pools, DEFAULT_LIMITS))
        self._text = Text(config, weights, self.pools, ops)
        self._layer = weights.layers[0]
        embedded = ops.embed(
            weights.embeddings_WD,
            self.step.token_ids_T,
            self._layer.input_norm_D,
            config.rms_norm_eps,
            self.step.positions_T,
            self._text.rope.lanes,
        )
        self._rotation = self._text.rope.of(embedded.rotation_TX)

    def again_with(self, ops: Ops) -> LayerRun:
        """The same run, on the same caches, through other ops."""
        again = copy.copy(self)
        again.ops, again._text = ops, Text(self.config, self.weights, self.pools, ops)
        return again

    def cached(self) -> tuple[Tensor, Tensor | None] | tuple[None, None]:
        """Latent rows [B, S, L] and index keys [B, S, J] before the new tokens, all that are held, copied.

        Index keys are None in a sliding layer; both are where nothing has been seen. Requests must be of one length.
        """
        length = self.seen[0]
        if not length:
            return None, None
        held = range(0 if self.config.is_full(0) else max(0, length + 1 - self.config.sliding_window_size), length)
        latents_BSL = torch.stack([self.pools.latent_rows(request, 0, held) for request in self.requests])
        if not self.config.is_full(0):
            return latents_BSL, None
        return latents_BSL, torch.stack([self.pools.index_key_rows(request, 0, held) for request in self.requests])

    def norm(self, hidden_TD: Tensor) -> Tensor:
        """The layer's input, as the layer before it would have left it."""
        return self.ops.rms_norm(hidden_TD, self._layer.input_norm_D, self.config.rms_norm_eps)

    @torch.no_grad()
    def __call__(self, hidden_TD: Tensor, normed_TD: Tensor) -> Tensor:
        """[T, D]: the stream behind the layer."""
        stream_TD, delta = self._text.layer(
            0, self._layer, hidden_TD, normed_TD, self.step, self._rotation, BatchObserver(())
        )
        return self.ops.add_parts_rms_norm(
            stream_TD, delta.parts_STX, self.weights.final_norm_D, self.config.rms_norm_eps, delta.weights_TK
        )[0]

    def fill(self, generator: torch.Generator) -> None:
        """Random rows in all caches."""
        for pool in (self.pools.latents, self.pools.index_keys, self.pools.rings):
            pool.normal_(generator=generator)

    def of_rows(self, rows: Sequence[int], weights: PackedText, ops: Ops) -> LayerRun:
        """A decode step with a request for each of these rows, on copies of what is cached, in the dtype of `weights`.

        Of a prompt, a sliding layer has what only its last KEPT_ROWS + 1 rows need; this run must have run before.
        """
        positions, requests = self.step.positions_T.tolist(), self.step.request_T.tolist()
        few = LayerRun(self.config, weights, ops, [positions[row] for row in rows], 1, self.pools.page_size)
        for request, row in zip(few.requests, rows, strict=True):
            theirs, ours = few.pools.slots(request), self.pools.slots(self.requests[requests[row]])
            if self.config.is_full(0):
                pages = list(ours.pages[: len(theirs.pages)])
                few.pools.latent_pool(0)[list(theirs.pages)] = self.pools.latent_pool(0)[pages].to(few.pools.dtype)
                few.pools.index_pool(0)[list(theirs.pages)] = self.pools.index_pool(0)[pages].to(few.pools.dtype)
            else:
                few.pools.ring_pool(0)[theirs.ring] = self.pools.ring_pool(0)[ours.ring].to(few.pools.dtype)
        return few
