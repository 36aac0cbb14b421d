"""Section E, second part: which keys the indexer selects, what attention makes of them, and the cached index keys.

Source: text_model specification, sections 7, 8 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reference.layers.attention
import reference.layers.indexer
import reference.layers.mla
from parity.faults.fault import Fault, Patch, text_edit
from parity.faults.indexer import SCORES, index_dots
from reference.config import NoteConfig
from reference.errors import CacheError
from reference.layers.indexer import Indexer, mask_of, select
from reference.layers.mla import FullAttention
from reference.probe import Rows, narrowed_rows, probe, scope
from reference.session import Session, StepItem

# T query tokens  S key tokens  D model  Q query latent  H heads  I index heads  J index head dim  K selected keys

SELECTED, CORE = "layers.{i}.attn.index.selected", "layers.{i}.attn.core"
PRUNING = "T > index_topk"

Select = Callable[[Tensor, Tensor, int], Tensor]


def _with_filler(original: Select) -> Select:
    return lambda scores_TS, visible_TS, topk: original(scores_TS, torch.ones_like(visible_TS), topk)


def _with_self(original: Select) -> Select:
    def selected(scores_TS: Tensor, visible_TS: Tensor, topk: int) -> Tensor:
        newest_T1 = visible_TS.sum(-1, keepdim=True) - 1
        return original(scores_TS.scatter(-1, newest_T1, float("inf")), visible_TS, topk)

    return selected


def _visible_block_with(choose: Callable[[Tensor, Tensor, int], Tensor]) -> Patch:
    """A patch of the selection that sees the scores of each index head: `choose(scores_TIS, causal_TS, topk)`.

    The summed and masked scores are shown as they should be.
    """

    def visible_block(indexer: Any, rows: Any, positions_T: Tensor, key_SJ: Tensor, block: slice) -> Tensor:
        S = len(key_SJ)
        causal_TS = torch.arange(S, device=key_SJ.device) <= positions_T[block, None]
        with scope("index"), narrowed_rows(block):
            dots_TIS = F.relu(index_dots(indexer, rows.query_TIJ[block], key_SJ))
            scores_TIS = rows.head_weights_TI[block, :, None] * dots_TIS
            probe("scores", scores_TIS.sum(1).masked_fill(~causal_TS, float("-inf")))
            selected_TK = probe("selected", choose(scores_TIS, causal_TS, indexer.topk))
        return mask_of(selected_TK, S)

    return Patch(Indexer, "_visible_block", lambda original: visible_block)


def _chosen_before_mask(scores_TIS: Tensor, causal_TS: Tensor, topk: int) -> Tensor:
    return select(scores_TIS.sum(1), causal_TS, topk)


def _chosen_by_each_head(scores_TIS: Tensor, causal_TS: Tensor, topk: int) -> Tensor:
    """Every index head picks an equal share of the `topk` keys; the union counts. No pruning where all keys fit."""
    I = scores_TIS.shape[1]  # noqa: E741 (the legend's letter)
    masked_TIS = scores_TIS.masked_fill(~causal_TS[:, None], float("-inf"))
    best_TIK = masked_TIS.sort(dim=-1, descending=True, stable=True).indices[..., : max(1, topk // I)]
    picked_TS = torch.zeros_like(causal_TS).scatter(-1, best_TIK.flatten(1), True) & causal_TS
    fits_T1 = causal_TS.sum(-1, keepdim=True) <= topk
    kept_TS = torch.where(fits_T1, causal_TS, picked_TS)
    return select(kept_TS.double(), kept_TS, topk)


class _StaleTail:
    """Listener: the list of selected keys lives in one buffer for each layer, and only its valid part is written."""

    def __init__(self, config: NoteConfig):
        self._topk = config.text.index_topk
        self._buffers: dict[str, Tensor] = {}

    def observe(self, name: str, value: Tensor, rows: Rows | None) -> Tensor:
        if rows is None or not name.endswith(".index.selected"):
            return value
        T, key_count = len(value), int(rows.positions[-1]) + 1
        valid_TK = F.pad(value, (0, self._topk - value.shape[1]), value=-1)
        before = self._buffers.get(name, valid_TK.new_empty(0, self._topk))
        leftover_TK = torch.cat((before[:T], torch.full_like(valid_TK, -1)))[:T]
        read_TK = torch.where(valid_TK < 0, leftover_TK, valid_TK)
        self._buffers[name] = torch.cat((read_TK, before[T:]))
        # Past the last key there is nothing to read.
        return read_TK.masked_fill(read_TK >= key_count, -1)


def _resumes_short(session: Session, items: Sequence[StepItem]) -> bool:
    for item in items:
        with suppress(CacheError):  # a request that starts with this step
            if session.length(item.request) + len(item.token_ids) <= session.model.config.index_topk:
                return True
    return False


def _dense_with_short_neighbour(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that resumes a request with at most topk tokens takes the dense route for all of its requests."""

    def run(session: Session, items: Sequence[StepItem]) -> Any:
        indexers = [module for module in session.model.modules() if isinstance(module, Indexer)]
        config = session.model.config
        topk = config.max_position_embeddings if _resumes_short(session, items) else config.index_topk
        for indexer in indexers:
            indexer.topk = topk
        return step(session, items)

    return run


def _causal_counted(visible_keys: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """2 for a selected key, 1 for another key up to the query's position."""

    def counted(indexer: Any, rows: Any, positions_T: Tensor, key_SJ: Tensor, workspace_bytes: int) -> Tensor:
        selected_TS = visible_keys(indexer, rows, positions_T, key_SJ, workspace_bytes)
        causal_TS = torch.arange(len(key_SJ), device=key_SJ.device) <= positions_T[:, None]
        return selected_TS.int() + causal_TS.int()

    return counted


def _softmax_over_causal(masked_softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def over_causal(scores_HTS: Tensor, visible_TS: Tensor) -> Tensor:
        if visible_TS.dtype == torch.bool:
            return masked_softmax(scores_HTS, visible_TS)
        return masked_softmax(scores_HTS, visible_TS >= 1) * (visible_TS == 2)

    return over_causal


class _SelectionOnSliding:
    """The selection of the full layer before is applied to sliding layers as well."""

    def __init__(self) -> None:
        self._selected_TS = torch.zeros(0, 0, dtype=torch.bool)

    def keep(self, visible_keys: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def kept(*arguments: Any) -> Tensor:
            self._selected_TS = visible_keys(*arguments)
            return self._selected_TS

        return kept

    def apply(self, in_window: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def both(query_positions_T: Tensor, key_positions_S: Tensor, window: int) -> Tensor:
            visible_TS = in_window(query_positions_T, key_positions_S, window)
            T, S = self._selected_TS.shape
            # The draft layer runs other rows than the full layer before it did.
            is_of_these_rows = len(query_positions_T) == T and int(query_positions_T[-1]) + 1 == S
            return visible_TS & self._selected_TS[:, key_positions_S] if is_of_these_rows else visible_TS

        return both


_SELECTION_ON_SLIDING = _SelectionOnSliding()


def _unwritten_while_short(keys: Callable[..., Any]) -> Callable[..., Any]:
    def run(attention: Any, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: Any) -> Any:
        found = keys(attention, attn_input_TD, q_latent_TQ, positions_T, cache)
        if cache.length <= attention.indexer.topk:
            cache.tensors()["index_key"] = torch.zeros_like(cache.tensors()["index_key"])
        return found

    return run


def _cached_before_rope(keys: Callable[..., Any]) -> Callable[..., Any]:
    def run(attention: Any, attn_input_TD: Tensor, q_latent_TQ: Tensor, positions_T: Tensor, cache: Any) -> Any:
        found = keys(attention, attn_input_TD, q_latent_TQ, positions_T, cache)
        unrotated_TJ = attention.indexer.k_norm(attention.indexer.wk(attn_input_TD))
        past_SJ = cache.tensors()["index_key"][: -len(positions_T)]
        cache.tensors()["index_key"] = torch.cat((past_SJ, unrotated_TJ))
        return found

    return run


SELECTION_FAULTS = (
    Fault(
        "topk_ignored_dense",
        says="full layers attend to every key up to the query",
        visibility="L",
        first=(SELECTED,),
        visible_when=PRUNING,
        source="vllm.cpp; MLX refuses",
        config=lambda config: text_edit(index_topk=config.text.max_position_embeddings)(config),
    ),
    Fault(
        "mixed_batch_dense",
        says="a step that resumes a short request runs dense for all of its requests",
        visibility="C",
        first=(SELECTED,),
        visible_when="two requests in a step, a resumed short one and one past index_topk",
        source="vllm.cpp",
        patches=(Patch(Session, "step", _dense_with_short_neighbour),),
    ),
    Fault(
        "topk_stale_tail",
        says="rows with fewer than index_topk keys read what an earlier step left in the list",
        visibility="C",
        first=(SELECTED,),
        visible_when="a prefill behind a longer row in the same place of the buffer",
        source="vllm.cpp",
        listener=_StaleTail,
    ),
    Fault(
        "topk_noncausal_fill",
        says="keys that fill up a short list are attended to although they lie behind the query",
        visibility="V",
        first=(SELECTED,),
        visible_when="a prefill of 2 tokens",
        source="transformers 5.24 mask logic",
        patches=(Patch(reference.layers.indexer, "select", _with_filler),),
    ),
    Fault(
        "topk_no_causal_mask",
        says="the best keys are taken before the causal mask, so that later keys crowd out earlier ones",
        visibility="L",
        first=(SELECTED,),
        visible_when="a prefill of T > index_topk",
        source="analysis",
        patches=(_visible_block_with(_chosen_before_mask),),
    ),
    Fault(
        "topk_plus_self",
        says="the newest key is always selected",
        visibility="L",
        first=(SELECTED,),
        visible_when=PRUNING,
        source="analysis",
        patches=(Patch(reference.layers.indexer, "select", _with_self),),
    ),
    Fault(
        "topk_2047",
        says="one key too few is selected",
        visibility="L",
        first=(SELECTED,),
        visible_when="T >= index_topk",
        source="analysis",
        config=lambda config: text_edit(index_topk=config.text.index_topk - 1)(config),
    ),
    Fault(
        "topk_softmax_over_all",
        says="the softmax covers every key up to the query, and unselected ones are dropped after it",
        visibility="L",
        first=(CORE,),
        visible_when=PRUNING,
        source="analysis",
        patches=(
            Patch(Indexer, "visible_keys", _causal_counted),
            Patch(reference.layers.attention, "masked_softmax", _softmax_over_causal),
        ),
    ),
    Fault(
        "index_cache_skipped_short",
        says="index keys are not cached while at most index_topk keys are there",
        visibility="C",
        first=(SCORES,),
        visible_when="a step up to index_topk, then one past it",
        source="vLLM, which always writes them",
        patches=(Patch(FullAttention, "_keys", _unwritten_while_short),),
    ),
    Fault(
        "index_cache_pre_rope",
        says="index keys are cached before their rotation",
        visibility="C",
        first=(SCORES,),
        visible_when="second step",
        source="analysis",
        patches=(Patch(FullAttention, "_keys", _cached_before_rope),),
    ),
    Fault(
        "indexer_on_sliding",
        says="sliding layers also apply the selection of the full layer before",
        visibility="L",
        first=(CORE,),
        visible_when=PRUNING,
        source="vllm.cpp",
        patches=(
            Patch(Indexer, "visible_keys", _SELECTION_ON_SLIDING.keep),
            Patch(reference.layers.mla, "in_window", _SELECTION_ON_SLIDING.apply),
        ),
    ),
    Fault(
        "per_head_topk",
        says="every index head selects a share of its own",
        visibility="L",
        first=(SELECTED,),
        visible_when=PRUNING,
        source="analysis",
        patches=(_visible_block_with(_chosen_by_each_head),),
    ),
)
