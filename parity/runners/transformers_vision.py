"""The oracle of the vision tower: transformers 5.24's `Dots3NoteVisionModel`, with its own config class and converter.

The weights are those of a released-layout folder, read from its files without this project's loader. A folder needs no
text or audio model that transformers would accept: its vision class is built alone. Intermediates are shown under the
names of `parity.schema_vision`: where a module boundary has the value a hook shows it, where not, the function that
computes it is wrapped (rotation, attention) or its calls are noted (cosine, sigmoid, top-k). Values are shown, never
changed. All frames of a call run together there, with attention cut into frames.

transformers keeps the router's weight in float32 (its values are those of bfloat16), shows the chosen experts in no
particular order (they are put into descending choice here), and adds no rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from parity.exact import LowerPrecisionOp, exact
from parity.runners import NotSupportedHere
from parity.runners.transformers import (
    INDEX_FILE,
    SUPPORTED_VERSION,
    quiet,
    read_index,
    read_json,
    require_transformers,
)
from parity.runners.transformers_probes import _Calls, _show
from reference.config import NoteConfig
from reference.errors import CheckpointError
from reference.layers.vision_grid import Grid
from reference.probe import is_observed, rows

# N patches of a call  H heads  J head dim  E experts  K chosen experts  P pairs of lanes

PREFIX = "vision_encoder."


class TransformersVisionRunner:
    """transformers' vision tower on the weights of a folder; see `VisionRunner`.

    With `exact` everything, loading included, runs in float64 and `lower_precision_ops` lists what did not; `dtype` is
    then float64 whatever was asked for.
    Raises: RunnerUnavailable without transformers 5.24, NotSupportedHere for a folder without a vision tower,
    ConfigError and CheckpointError for a folder whose tower is not complete.
    """

    name = f"transformers {SUPPORTED_VERSION}"

    def __init__(self, folder: str | Path, dtype: torch.dtype, exact: bool = False):
        require_transformers()
        folder = Path(folder)
        config = NoteConfig.from_json(folder / "config.json")
        if config.vision is None:
            raise NotSupportedHere(f"{folder}: config.json has no vision_config")
        self.vision = config.vision
        self.dtype = torch.float64 if exact else dtype
        self.lower_precision_ops: list[LowerPrecisionOp] = []
        self._exact = exact
        with self._precision():
            self.model = _load(folder, self.dtype)

    def embed(self, pixels_NX: Tensor, grids: Sequence[Grid]) -> Tensor:
        with torch.no_grad(), self._precision(), observed(self.model, len(pixels_NX)):
            # In exact mode no value may come in that a cast could round.
            wide = pixels_NX.to(torch.promote_types(torch.float32, self.dtype))
            return self.model(wide, torch.tensor(grids).reshape(-1, 3)).pooler_output

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with exact() if self._exact else nullcontext() as spy:
            yield
        if spy:
            self.lower_precision_ops += spy.lower_precision_ops


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteVisionConfig
    from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteVisionModel

    try:
        config = Dots3NoteVisionConfig(**read_json(folder / "config.json")["vision_config"])
    except StrictDataclassError as error:
        raise NotSupportedHere(f"{folder}: transformers refuses this vision_config: {error}") from error
    with quiet() as messages:
        try:
            model, report = Dots3NoteVisionModel.from_pretrained(
                None,
                config=config,
                state_dict=_weights(folder),
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
        except (RuntimeError, ValueError) as error:
            told = "\n".join((str(error), *messages))
            raise CheckpointError(f"{folder}: transformers cannot load its vision tower: {told}") from error
    problems = [f"{kind[:-5]} {name}" for kind in ("missing_keys", "unexpected_keys") for name in sorted(report[kind])]
    if problems:
        raise CheckpointError(f"{folder}: transformers did not find the vision tower's tensors: {'; '.join(problems)}")
    return model.eval()


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tower's tensors under the names that transformers' converter takes: without their prefix."""
    found = {}
    for name, file in read_index(folder / INDEX_FILE)["weight_map"].items():
        if name.startswith(PREFIX):
            try:
                with safe_open(folder / file, framework="pt") as shard:
                    found[name.removeprefix(PREFIX)] = shard.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / file}: {name!r} cannot be read: {error}") from error
    return found


@contextmanager
def observed(model: Any, patches: int) -> Iterator[None]:
    """Show every intermediate of a call with so many patches; nothing is in place if nobody listens."""
    if not is_observed():
        yield
        return
    with ExitStack() as stack:
        _Observer(stack, model, patches).watch()
        yield


class _Observer:
    """Hooks and patches of one call; `stack` takes them away again."""

    def __init__(self, stack: ExitStack, model: Any, patches: int):
        self._stack, self._model = stack, model
        self._patches = torch.arange(patches)
        self._merged = torch.arange(patches // model.spatial_merge_size**2)
        # Values and attention outputs of the frames of the block that runs.
        self._frames: list[tuple[Tensor, Tensor]] = []

    def watch(self) -> None:
        from transformers.models.dots3_note import modeling_dots3_note

        model, merger = self._model, self._model.merger
        self._on_input(model.patch_embed, "pixels")
        self._hook(model.patch_embed.proj, lambda module, args, output: self._show("patch_proj", output.flatten(1)))
        self._on_output(model.patch_embed.norm, "patches")
        self._around(model.rotary_pos_emb, (Tensor.cos,), self._show_angles)
        for index, block in enumerate(model.blocks):
            self._watch_block(f"blocks.{index}", block)
        self._on_output(model.norm, "trunk")
        self._on_output(merger.ln_q, "merger.normed")
        self._on_input(merger.mlp[0], "merger.grouped", is_merged=True)
        self._on_output(merger.mlp[1], "merger.hidden", is_merged=True)
        self._on_output(merger, "merged", is_merged=True)
        attend = modeling_dots3_note.eager_attention_forward

        def observed_attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            result = attend(module, query, key, value, *args, **kwargs)
            self._frames.append((value[0].transpose(0, 1), result[0][0]))
            return result

        self._patch(modeling_dots3_note, "eager_attention_forward", observed_attention)

    def _watch_block(self, name: str, block: Any) -> None:
        from transformers.models.dots3_note import modeling_dots3_note

        rotate = modeling_dots3_note.apply_rotary_pos_emb_vision

        def rotated(*args: Any) -> tuple[Tensor, Tensor]:
            query_NHJ, key_NHJ = rotate(*args)
            self._show(f"{name}.attn.q", query_NHJ)
            self._show(f"{name}.attn.k", key_NHJ)
            return query_NHJ, key_NHJ

        forward = block.attn.forward

        def observed_forward(*args: Any, **kwargs: Any) -> Tensor:
            with mock.patch.object(modeling_dots3_note, "apply_rotary_pos_emb_vision", rotated):
                return forward(*args, **kwargs)

        self._on_input(block, f"{name}.input")
        self._on_output(block.norm1, f"{name}.attn.input")
        self._patch(block.attn, "forward", observed_forward)
        self._stack.callback(block.attn.proj.register_forward_pre_hook(lambda *_: self._show_core(name)).remove)
        self._on_output(block.attn.proj, f"{name}.attn.output")
        self._on_output(block.norm2, f"{name}.ffn.input")
        if hasattr(block.mlp, "experts"):
            self._around(
                block.mlp.gate,
                (torch.sigmoid, torch.topk),
                lambda calls, output: self._show_router(f"{name}.ffn.router", calls, output),
            )
        self._on_output(block.mlp, f"{name}.ffn.output")
        self._on_output(block, f"{name}.output")

    def _show_angles(self, calls: list, _: Any) -> None:
        """`calls`: the cosine of angles [N, 2, P/2], row before column."""
        (((angles,), _),) = calls
        self._show("rope.angles", angles.flatten(1))

    def _show_core(self, name: str) -> None:
        values, cores = zip(*self._frames, strict=True)
        self._frames = []
        self._show(f"{name}.attn.v", torch.cat(values))
        self._show(f"{name}.attn.core", torch.cat(cores))

    def _show_router(self, name: str, calls: list, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """`calls`: the sigmoid of the logits, then the top-k of the biased scores."""
        (_, scores_NE), ((choice_NE, *_), _) = calls
        logits_NE, weights_NK, ids_NK = output
        by_id_NK = ids_NK.sort(dim=-1).indices
        by_choice_NK = (
            choice_NE.gather(-1, ids_NK.gather(-1, by_id_NK)).sort(dim=-1, descending=True, stable=True).indices
        )
        order_NK = by_id_NK.gather(-1, by_choice_NK)
        self._show(f"{name}.logits", logits_NE)
        self._show(f"{name}.scores", scores_NE)
        self._show(f"{name}.choice", choice_NE)
        self._show(f"{name}.expert_ids", ids_NK.gather(-1, order_NK))
        self._show(f"{name}.weights", weights_NK.gather(-1, order_NK))

    def _show(self, name: str, value: Tensor, is_merged: bool = False) -> None:
        with rows("images", self._merged if is_merged else self._patches, "prefill"):
            _show(f"vision.{name}", value)

    def _on_input(self, module: nn.Module, name: str, is_merged: bool = False) -> None:
        def show(module: nn.Module, args: tuple) -> None:
            self._show(name, args[0], is_merged)

        self._stack.callback(module.register_forward_pre_hook(show).remove)

    def _on_output(self, module: nn.Module, name: str, is_merged: bool = False) -> None:
        self._hook(module, lambda module, args, output: self._show(name, output, is_merged))

    def _hook(self, module: nn.Module, show: Callable[[Any, Any, Any], None]) -> None:
        self._stack.callback(module.register_forward_hook(show).remove)

    def _around(self, module: nn.Module, functions: tuple, show: Callable[[list, Any], None]) -> None:
        forward = module.forward

        def noted_forward(*args: Any, **kwargs: Any) -> Any:
            with _Calls(*functions) as calls:
                output = forward(*args, **kwargs)
            show(calls.noted, output)
            return output

        self._patch(module, "forward", noted_forward)

    def _patch(self, owner: Any, name: str, replacement: Callable) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, replacement))
