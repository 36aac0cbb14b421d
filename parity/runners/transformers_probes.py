"""Shows the intermediates of transformers' `dots3_note` under the schema's names and layouts, while a step runs.

Where a module boundary has the value, a forward hook or pre-hook shows it. Where not, a module's `forward` runs with
the torch functions that it calls noted (the two products of the indexer, the sigmoids), or the attention function is
wrapped. Everything is in place only inside `observed`, and only if somebody listens; values are shown, never changed.

Layouts: batch dim removed, token-major, new rows only. transformers keeps rotated lanes as [even | odd]; they are put
back in place here. Its choice of experts comes in no particular order and is shown by descending choice.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity.runners import NotSupportedHere
from reference.probe import is_observed, probe

# T new tokens  S key tokens  H heads  N nope dim  R rope dim  E experts  K chosen experts or keys
# I index heads  J index head dim  X any last dim

# Names of the schema (globs) that are never shown: transformers has no draft layer, this runner loads no towers, and
# the rows of its caches are those that `attn.kv_latent`, `attn.k_rope` and `attn.index.key` showed.
NOT_EXPOSED = ("mtp.*", "cache.*", "vision.*", "audio.*")


@contextmanager
def observed(model: Any) -> Iterator[None]:
    """Show the intermediates of every forward of `model` (a Dots3NoteForCausalLM, batch of one) inside.

    Raises: NotSupportedHere, from the forward, if a listener puts another value in the place of one shown.
    """
    if not is_observed():
        yield
        return
    with ExitStack() as stack:
        observer = _Observer(stack)
        observer.watch_model(model)
        for index, layer in enumerate(model.model.layers):
            observer.watch_layer(f"layers.{index}", layer)
        yield


class _Calls(TorchFunctionMode):
    """Notes the arguments and the result of each call of one of `functions`, in order."""

    def __init__(self, *functions: Callable):
        super().__init__()
        self._functions = functions
        self.noted: list[tuple[tuple, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._functions:
            self.noted.append((args, result))
        return result


class _Observer:
    """Hooks and patches of one step; `stack` takes them away again."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._new_rows = 0

    def watch_model(self, model: Any) -> None:
        from transformers.models.dots3_note import modeling_dots3_note

        self._on_output(model.model.embed_tokens, "embeddings")
        self._on_output(model.model.norm, "final_norm")
        self._on_output(model.lm_head, "logits")
        attend = modeling_dots3_note.eager_attention_forward

        def observed_attention(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = attend(module, query, key, *args, **kwargs)
            _show_attention(f"layers.{module.layer_idx}.attn", module.qk_nope_head_dim, query[0], key[0], result[0][0])
            return result

        self._patch(modeling_dots3_note, "eager_attention_forward", observed_attention)

    def watch_layer(self, name: str, layer: Any) -> None:
        self._on_input(layer, f"{name}.input")
        self._on_output(layer.input_layernorm, f"{name}.attn.input")
        self._watch_attention(f"{name}.attn", layer.self_attn)
        self._on_output(layer.post_attention_layernorm, f"{name}.ffn.input")
        if hasattr(layer.mlp, "experts"):
            self._watch_moe(f"{name}.ffn", layer.mlp)
        self._on_output(layer.mlp, f"{name}.ffn.output")
        self._on_output(layer, f"{name}.output")

    def _watch_attention(self, name: str, attention: Any) -> None:
        def show_latent(module: nn.Module, args: tuple) -> None:
            # The input of kv_b_proj is the whole visible cache, [1, 1, S, X]; the new rows are the last.
            _show(f"{name}.kv_latent", args[0][0, 0, -self._new_rows :])

        def show_rope_key(module: nn.Module, args: tuple, output: Tensor) -> None:
            self._new_rows = output.shape[2]
            _show(f"{name}.k_rope_unrotated", output[0, 0])

        self._on_input(attention.q_b_proj, f"{name}.q_latent")
        self._hook(attention.k_rope_only_layernorm.register_forward_hook(show_rope_key))
        self._hook(attention.kv_b_proj.register_forward_pre_hook(show_latent))
        self._around(attention, (Tensor.sigmoid,), lambda calls, _: _show(f"{name}.gate", calls[0][1][0, ..., 0]))
        self._hook(attention.register_forward_hook(lambda module, args, output: _show(f"{name}.output", output[0][0])))
        if attention.indexer is not None:
            rope_dim = attention.indexer.qk_rope_head_dim
            self._around(
                attention.indexer,
                (torch.matmul,),
                lambda calls, selected: _show_index(f"{name}.index", rope_dim, calls, selected),
            )

    def _watch_moe(self, name: str, moe: Any) -> None:
        self._around(
            moe.gate,
            (Tensor.sigmoid, Tensor.masked_fill),
            lambda calls, output: _show_router(f"{name}.router", calls, output),
        )
        self._hook(moe.experts.register_forward_hook(lambda module, args, output: _show(f"{name}.routed", output)))
        self._on_output(moe.shared_experts, f"{name}.shared")

    def _on_input(self, module: nn.Module, name: str) -> None:
        self._hook(module.register_forward_pre_hook(lambda module, args: _show(name, args[0][0])))

    def _on_output(self, module: nn.Module, name: str) -> None:
        self._hook(module.register_forward_hook(lambda module, args, output: _show(name, output[0])))

    def _around(self, module: nn.Module, functions: tuple, show: Callable[[list, Any], None]) -> None:
        forward = module.forward

        def noted_forward(*args: Any, **kwargs: Any) -> Any:
            with _Calls(*functions) as calls:
                output = forward(*args, **kwargs)
            show(calls.noted, output)
            return output

        self._patch(module, "forward", noted_forward)

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _patch(self, owner: Any, name: str, replacement: Callable) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, replacement))


def _show(name: str, value: Tensor) -> None:
    if probe(name, value) is not value:
        raise NotSupportedHere(f"{name}: the transformers runner shows its values; a listener cannot replace them")


def _show_attention(name: str, nope_dim: int, query_HTX: Tensor, key_HSX: Tensor, core_THV: Tensor) -> None:
    T = query_HTX.shape[1]
    query_THX = query_HTX.transpose(0, 1)
    _show(f"{name}.k_rope", _in_place(key_HSX[0, -T:, nope_dim:]))
    _show(f"{name}.q_nope", query_THX[..., :nope_dim])
    _show(f"{name}.q_rope", _in_place(query_THX[..., nope_dim:]))
    _show(f"{name}.core", core_THV)


def _show_index(name: str, rope_dim: int, calls: list, selected_1TK: Tensor) -> None:
    """`calls`: queries times all keys, then head weights times the ReLU of that."""
    ((query_1TIJ, key_11JS), _), ((weights_1T1I, _), scores_1T1S) = calls
    query_TIJ, key_SJ, scores_TS = query_1TIJ[0], key_11JS[0, 0].mT, scores_1T1S[0, :, 0]
    T, S = scores_TS.shape
    _show(f"{name}.query", _leading_in_place(query_TIJ, rope_dim))
    _show(f"{name}.key", _leading_in_place(key_SJ[S - T :], rope_dim))
    _show(f"{name}.head_weights", weights_1T1I[0, :, 0])
    positions_T1 = torch.arange(S - T, S, device=scores_TS.device)[:, None]
    is_future_TS = torch.arange(S, device=scores_TS.device) > positions_T1
    _show(f"{name}.scores", scores_TS.masked_fill(is_future_TS, float("-inf")))
    # A query with fewer than K visible keys has its list filled up with future ones.
    selected_TK = selected_1TK[0].long()
    selected_TK = selected_TK.masked_fill(selected_TK > positions_T1, S).sort(dim=-1).values
    _show(f"{name}.selected", selected_TK.masked_fill(selected_TK == S, -1))


def _show_router(name: str, calls: list, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """`calls`: the sigmoid of the logits, then the masking of the groups that were not chosen."""
    (_, scores_TE), (_, choice_TE) = calls
    logits_TE, weights_TK, ids_TK = output
    by_id_TK = ids_TK.sort(dim=-1).indices
    by_choice_TK = choice_TE.gather(-1, ids_TK.gather(-1, by_id_TK)).sort(dim=-1, descending=True, stable=True).indices
    order_TK = by_id_TK.gather(-1, by_choice_TK)
    _show(f"{name}.logits", logits_TE)
    _show(f"{name}.scores", scores_TE)
    _show(f"{name}.choice", choice_TE)
    _show(f"{name}.expert_ids", ids_TK.gather(-1, order_TK))
    _show(f"{name}.weights", weights_TK.gather(-1, order_TK))


def _in_place(halves: Tensor) -> Tensor:
    """Rotated lanes [even | odd] back to where they came from: even and odd alternating."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def _leading_in_place(x: Tensor, rope_dim: int) -> Tensor:
    return torch.cat((_in_place(x[..., :rope_dim]), x[..., rope_dim:]), dim=-1)
