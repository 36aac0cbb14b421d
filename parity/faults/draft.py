"""Section J: the draft layer: what it reads, how steps chain, what its cache keeps.

Source: text_model specification, section 17.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.faults.fault import Fault, Patch, Weights, after_construction
from parity.faults.paging import KEEPS_ALL
from reference.config import NoteConfig, TextConfig
from reference.probe import Override, Rows, probe, scope
from reference.session import Session, StepItem
from reference.text import MtpBlock, TextModel

# T draft rows  D model  R rope dim  C kv latent  W vocabulary

EH_INPUT, FUSED, CORE = "mtp.{s}.eh_input", "mtp.{s}.fused", "mtp.{s}.attn.core"
Q_ROPE, K_ROPE = "mtp.{s}.attn.q_rope", "mtp.{s}.attn.k_rope"
FFN_INPUT, LOGITS = "mtp.{s}.ffn.input", "mtp.{s}.logits"


def _full_attention_semantics(block: Any, config: TextConfig, *_: Any) -> None:
    block.self_attn.rope.theta = config.full.rope_theta
    block.self_attn.window = config.max_position_embeddings


def _backbone_embedding(weights: Weights, config: NoteConfig) -> Weights:
    return weights | {"model.mtp.embed_tokens.weight": weights["model.embed_tokens.weight"]}


def _halves_exchanged(eh_input: Tensor, rows: Rows | None) -> Tensor:
    return eh_input.roll(eh_input.shape[-1] // 2, dims=-1)


def _swapped_input_norms(weights: Weights, config: NoteConfig) -> Weights:
    enorm, hnorm = ".enorm.weight", ".hnorm.weight"
    swapped = {name.replace(enorm, hnorm): tensor for name, tensor in weights.items() if name.endswith(enorm)}
    swapped |= {name.replace(hnorm, enorm): tensor for name, tensor in weights.items() if name.endswith(hnorm)}
    return weights | swapped


class _UnshiftedTokens:
    """Row t embeds token x[t], the one before its own."""

    def __init__(self) -> None:
        self._before: list[int] = []

    def of_draft(self, draft: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(session: Session, request: str, *arguments: Any) -> Tensor:
            state = session.request(request)
            self._before = [state.token_ids[state.cache.draft.length]]
            return draft(session, request, *arguments)

        return run

    def of_step(self, draft_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, step: int, next_ids_T: Tensor, *arguments: Any) -> Any:
            ids = [*self._before, *next_ids_T.tolist()]
            self._before = ids[-1:]
            return draft_step(model, step, next_ids_T.new_tensor(ids[:-1]), *arguments)

        return run


_UNSHIFTED_TOKENS = _UnshiftedTokens()


def _one_position_later(block: Any, *_: Any) -> None:
    """Rotated once more by the angle of one position: a shift that is exact, where another float32 angle is not."""
    rope = block.self_attn.rope

    def rotated(x: Tensor, positions_T: Tensor) -> Tensor:
        return rope.unrounded(rope.unrounded(x, positions_T), torch.ones_like(positions_T)).to(x.dtype)

    block.self_attn.rope = rotated


def _remember_input(norm: Any, owner: Any) -> None:
    """`owner.unnormed_TD` is what `norm` was last applied to."""
    right = norm.forward

    def remembered(x_TD: Tensor) -> Tensor:
        owner.unnormed_TD = x_TD
        return right(x_TD)

    norm.forward = remembered


def _remember_unnormed_hidden(model: Any, *_: Any) -> None:
    _remember_input(model.model.norm, model)


def _remember_unnormed_draft(block: Any, *_: Any) -> None:
    _remember_input(block.shared_head["norm"], block)


def _unnormed_for_draft(run_item: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(session: Any, item: StepItem) -> Tensor:
        logits_TW = run_item(session, item)
        state = session.request(item.request)
        if state.hidden_TD is not None:
            state.hidden_TD = torch.cat((state.hidden_TD[: -len(item.token_ids)], session.model.unnormed_TD))
        return logits_TW

    return run


def _draft_ends_in(ending: Callable[[Any, Any, Tensor], tuple[Tensor, Tensor]]) -> Patch:
    """A patch of a draft step: `ending(model, block, normed_TD)` gives the next hidden state and the logits."""

    def draft_step(model: Any, step: int, next_ids_T: Tensor, hidden_TD: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        block = model.model.layers[model.config.num_hidden_layers]
        with scope(f"mtp.{step}"):
            normed_TD = block.draft(model.model.mtp["embed_tokens"](next_ids_T), hidden_TD, cache.draft)
            return ending(model, block, normed_TD)

    return Patch(TextModel, "draft_step", lambda original: draft_step)


def _chain_unnormed(model: Any, block: Any, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
    return block.unnormed_TD, model.logits(normed_TD)


def _normed_again(model: Any, block: Any, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
    return normed_TD, model.logits(block.shared_head["norm"](normed_TD))


def _zero_head(model: Any, block: Any, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
    return normed_TD, probe("logits", torch.zeros_like(model.lm_head(normed_TD)))


def _without_prompt_rows(draft: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(session: Any, request: str, *arguments: Any) -> Tensor:
        state, geometry = session.request(request), session.model.config.sliding
        prompt = len(state.token_ids) - 1
        if state.cache.draft.length == 0 and prompt > 0:
            # Attention reads the rows as they were allocated.
            zeros = state.hidden_TD.new_zeros
            state.cache.draft.append(zeros(prompt, geometry.kv_lora_rank), zeros(prompt, geometry.qk_rope_head_dim))
        return draft(session, request, *arguments)

    return run


def _rejected_rows_kept(draft: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rows that an earlier draft wrote count as computed, as far as tokens have been committed since."""

    def run(session: Session, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        state = session.request(request)
        cache: Any = state.cache
        last = len(state.token_ids) - 1
        cache.draft.length = max(cache.draft.length, min(vars(cache).get("drafted_rows", 0), last))
        logits_SW = draft(session, request, next_token, depth, forced)
        cache.drafted_rows = last + depth
        return logits_SW

    return run


def _residual_from_embedding(block: Any, *_: Any) -> None:
    embedding_norm, attention = block.enorm.forward, block.self_attn.forward
    embedding: list[Tensor] = []

    def remembered(embedding_TD: Tensor) -> Tensor:
        embedding[:] = [embedding_TD]
        return embedding_norm(embedding_TD)

    def forward(fused_TD: Tensor, cache: Any) -> Tensor:
        fused_TD = probe("input", fused_TD)
        with scope("attn"):
            hidden_TD = embedding[0] + attention(probe("input", block.input_layernorm(fused_TD)), cache)
        with scope("ffn"):
            ffn_input_TD = probe("input", block.post_attention_layernorm(hidden_TD))
            ffn_output_TD = probe("output", block.mlp(ffn_input_TD))
        return probe("output", hidden_TD + ffn_output_TD)

    block.enorm.forward, block.forward = remembered, forward


def _fault(fault_id: str, says: str, first: str, visible_when: str, source: str, **change: Any) -> Fault:
    return Fault(fault_id, says, "M", (first,), visible_when, source, **change)


DRAFT_FAULTS = (
    _fault(
        "mtp_kind_by_default",
        "the draft layer, whose index is past layer_types, has the base of full layers and no window",
        Q_ROPE,
        "a draft at 2 tokens",
        "MLX rule",
        patches=(*KEEPS_ALL, after_construction(MtpBlock, _full_attention_semantics)),
    ),
    _fault(
        "mtp_shares_embedding",
        "the draft layer embeds tokens with the backbone's table in place of its own",
        EH_INPUT,
        "one draft",
        "MLX, vllm-ascend, SGLang fallback",
        weights=_backbone_embedding,
    ),
    _fault(
        "eh_concat_swapped",
        "the hidden state comes before the embedding in the draft layer's input",
        EH_INPUT,
        "one draft",
        "analysis",
        listener=lambda config: Override("mtp.*.eh_input", _halves_exchanged),
    ),
    _fault(
        "enorm_hnorm_swapped",
        "the norms of embedding and hidden state have each other's weights",
        EH_INPUT,
        "one draft",
        "analysis",
        weights=_swapped_input_norms,
    ),
    _fault(
        "mtp_token_unshifted",
        "row t of the draft layer embeds token t in place of token t + 1",
        EH_INPUT,
        "one draft",
        "tokenspeed comment",
        patches=(
            Patch(Session, "draft", _UNSHIFTED_TOKENS.of_draft),
            Patch(TextModel, "draft_step", _UNSHIFTED_TOKENS.of_step),
        ),
    ),
    Fault(
        "mtp_position_plus_one",
        says="the draft layer rotates row t, queries and keys alike, to position t + 1",
        visibility="I",
        first=(Q_ROPE,),
        visible_when="never: only distances count",
        source="analysis",
        patches=(after_construction(MtpBlock, _one_position_later),),
        hides_in=(Q_ROPE, K_ROPE),
    ),
    _fault(
        "mtp_prenorm_hidden",
        "the first draft step reads the hidden state before the final norm",
        EH_INPUT,
        "one draft",
        "vLLM note, llama.cpp convention",
        patches=(
            after_construction(TextModel, _remember_unnormed_hidden),
            Patch(Session, "_run", _unnormed_for_draft),
        ),
    ),
    _fault(
        "mtp_chain_prenorm",
        "later draft steps read the state before shared_head.norm",
        EH_INPUT,
        "two drafts",
        "vLLM issue 45895",
        patches=(after_construction(MtpBlock, _remember_unnormed_draft), _draft_ends_in(_chain_unnormed)),
    ),
    _fault(
        "mtp_double_norm",
        "shared_head.norm is applied again before the head",
        LOGITS,
        "one draft",
        "vLLM comment",
        patches=(_draft_ends_in(_normed_again),),
    ),
    _fault(
        "mtp_pos0_mask",
        "the embedding at position 0 of the draft layer is zeroed where the other side keeps it, or the reverse",
        EH_INPUT,
        "one draft, row 0",
        "vLLM against SGLang and tokenspeed",
        numerics=lambda numerics: replace(numerics, mtp_mask_position_0=not numerics.mtp_mask_position_0),
    ),
    _fault(
        "mtp_no_prefill",
        "the prompt does not run through the draft layer, whose cache stays empty for it",
        CORE,
        "one draft behind a prompt of 2",
        "analysis",
        patches=(Patch(Session, "draft", _without_prompt_rows),),
    ),
    _fault(
        "mtp_cache_not_rolled_back",
        "rows of rejected drafts stay in the cache of the draft layer as if their tokens had been kept",
        CORE,
        "a draft after a rejection",
        "analysis",
        patches=(Patch(Session, "draft", _rejected_rows_kept),),
    ),
    _fault(
        "mtp_own_head",
        "the draft layer has a head of its own, which no tensor fills, so that it stays zero",
        LOGITS,
        "one draft",
        "analysis",
        patches=(_draft_ends_in(_zero_head),),
    ),
    _fault(
        "mtp_residual_from_embed",
        "the residual stream of the draft layer starts from the embedding in place of eh_proj's output",
        FFN_INPUT,
        "one draft",
        "analysis",
        patches=(after_construction(MtpBlock, _residual_from_embedding),),
    ),
)
