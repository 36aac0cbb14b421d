"""The oracle: transformers 5.24's `dots3_note`, an independent implementation of the text model.

It reads the released-layout folder itself, with its own config class and its own weight converter, and runs in eager
PyTorch, one request at a time, with one cache for each request. What it cannot do is refused by name:

- the draft (MTP) layer is not implemented; its tensors and the towers' are dropped, and listed in `dropped`;
- index heads are rotated in their leading lanes, in neighbouring pairs; latents are always rescaled; gates are one a
  head. A checkpoint that asks for anything else would run and be silently wrong.

Three of its habits are worked round here, without touching its arithmetic. It knows the draft layer only under the
number 46, so the names that it reports as unexpected are judged here. It takes the rotated width as
int(head_dim · (rope / head_dim)), which for some sizes (49 and 2, say) falls one short: the factor is then raised by
one unit in the last place. Its sliding cache forgets the rows behind the window, so it is told to keep them, which
makes truncation possible and changes no value.
"""

import copy
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.exact import LowerPrecisionOp, exact
from parity.runners import NotSupportedHere, RunnerUnavailable
from parity.runners.transformers_probes import observed
from reference.config import NoteConfig, TextConfig
from reference.errors import CacheError, CheckpointError, TokenIdError
from reference.probe import rows
from reference.session import StepItem

SUPPORTED_VERSION = "5.24"
INDEX_FILE = "model.safetensors.index.json"
# The draft layer's number, of which transformers' pattern for names to ignore is made.
DRAFT_LAYER = 46

# T new tokens  S cached tokens  W vocabulary


class TransformersRunner:
    """transformers' text model behind the `Runner` protocol; the weights are those of a released-layout folder.

    `dtype` is that of weights and activations (the router keeps float32, as transformers wants it). With `exact`
    everything, loading included, runs in float64 and `lower_precision_ops` lists what did not; `dtype` is then float64
    whatever was asked for. `dropped` names the tensors of the folder that transformers has no place for.
    Raises: RunnerUnavailable without transformers 5.24, NotSupportedHere for a model that it would run wrongly,
    ConfigError and CheckpointError for a folder that is not a complete checkpoint of the text model.
    """

    name = f"transformers {SUPPORTED_VERSION}"

    def __init__(self, folder: str | Path, dtype: torch.dtype, exact: bool = False):
        require_transformers()
        folder = Path(folder)
        self.config = NoteConfig.from_json(folder / "config.json")
        self.dtype = torch.float64 if exact else dtype
        self.lower_precision_ops: list[LowerPrecisionOp] = []
        self._exact = exact
        self._caches: dict[str, Any] = {}
        index = read_index(folder / INDEX_FILE)
        _refuse_unsupported(self.config.text, index["metadata"])
        with self._precision():
            config = _transformers_config(folder, self.config)
            self.model, self.dropped = _load(folder, config, self.dtype, index["weight_map"])

    def step(self, items: Sequence[StepItem]) -> dict[str, Tensor]:
        """Append each item's tokens to its request. Returns logits [T, W] of the new rows, in `dtype`.

        Raises: CacheError for two items of one request, TokenIdError; both before anything has run. NotSupportedHere
        if a listener replaces a value.
        """
        self._check(items)
        with torch.no_grad(), self._precision():
            return {item.request: self._run(item) for item in items}

    def draft(self, request: str, next_token: int, depth: int, forced: Sequence[int] = ()) -> Tensor:
        raise NotSupportedHere("transformers has no draft layer for dots3_note")

    def truncate(self, request: str, length: int) -> None:
        cache = self._cache(request)
        held = cache.get_seq_length()
        if not 0 <= length <= held:
            raise CacheError(f"request {request!r} has {held} tokens and cannot be truncated to {length}")
        for layer in cache.layers:
            if layer.is_sliding:
                # Its own `crop` would forget all rows but a window's, and with them any further truncation.
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
                layer.cumulative_length = length
            else:
                layer.crop(length - held)

    def fork(self, request: str, new: str) -> None:
        cache = self._cache(request)
        if new in self._caches:
            raise CacheError(f"cannot fork to {new!r}: a request of that name exists")
        self._caches[new] = copy.deepcopy(cache)

    def free(self, request: str) -> None:
        self._cache(request)
        del self._caches[request]

    def _run(self, item: StepItem) -> Tensor:
        if item.request not in self._caches:
            self._caches[item.request] = _new_cache(self.model.config)
        cache = self._caches[item.request]
        held = cache.get_seq_length()
        positions_T = torch.arange(held, held + len(item.token_ids))
        with rows(item.request, positions_T, item.kind), observed(self.model):
            output = self.model(input_ids=torch.tensor([item.token_ids]), cache=cache, use_cache=True)
        return output.logits[0]

    def _check(self, items: Sequence[StepItem]) -> None:
        names = [item.request for item in items]
        vocab_size = self.config.text.vocab_size
        for item in items:
            if names.count(item.request) > 1 or not item.token_ids:
                raise CacheError(
                    f"request {item.request!r}: a step takes one item with at least one token for each request"
                )
            if item.embeddings_TD is not None:
                raise NotSupportedHere(f"request {item.request!r}: this runner takes token ids, not embeddings")
            for token_id in item.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise TokenIdError(
                        f"request {item.request!r}: token id {token_id} is outside the vocabulary "
                        f"(0 to {vocab_size - 1})"
                    )

    def _cache(self, request: str) -> Any:
        if request not in self._caches:
            raise CacheError(f"no request {request!r}; there are {sorted(self._caches)}")
        return self._caches[request]

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with exact() if self._exact else nullcontext() as spy:
            yield
        if spy:
            self.lower_precision_ops += spy.lower_precision_ops


def require_transformers() -> None:
    needed = f"transformers {SUPPORTED_VERSION}.x is needed: pip install 'note-parity[oracle]'"
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise RunnerUnavailable(f"transformers is not installed; {needed}") from error
    if version.split(".")[:2] != SUPPORTED_VERSION.split("."):
        raise RunnerUnavailable(f"transformers {version} is installed, whose internals are not known here; {needed}")


def _refuse_unsupported(text: TextConfig, index_metadata: dict[str, Any]) -> None:
    """What transformers does not read, and computes in the released way regardless."""
    kinds = {text.is_full(layer) for layer in range(text.num_hidden_layers)}
    refusals = {
        "elementwise attention gates: it knows headwise ones only": "elementwise"
        in {(text.full if is_full else text.sliding).gate_type for is_full in kinds},
        "apply_mla_qkv_lora_rescale false: it always rescales": not text.apply_mla_qkv_lora_rescale,
        "indexer_rope_interleave false: it rotates neighbouring lanes": True in kinds
        and not text.indexer_rope_interleave,
        "indexer_rope_layout 'tail' in the index: it rotates the leading lanes": True in kinds
        and index_metadata.get("indexer_rope_layout", "leading") != "leading",
    }
    for reason, is_refused in refusals.items():
        if is_refused:
            raise NotSupportedHere(f"transformers {SUPPORTED_VERSION} cannot run {reason}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error


def read_index(path: Path) -> dict[str, Any]:
    index = read_json(path)
    for key in ("metadata", "weight_map"):
        if not isinstance(index, dict) or not isinstance(index.get(key), dict):
            raise CheckpointError(f"{path}: must be an object with an object {key!r}")
    return index


def _transformers_config(folder: Path, config: NoteConfig) -> Any:
    """transformers' own reading of the flat `config.json`, as its text config.

    Its multimodal class hands all top-level keys to the text class just so, but refuses a folder without towers.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteTextConfig

    values = read_json(folder / "config.json")
    # A rope_scaling of type "default" means none, but transformers would lose both thetas over it.
    for key in ("architectures", "model_type", "vision_config", "audio_config", "rope_scaling"):
        values.pop(key, None)
    # Copies of other keys, for which transformers would take the released value.
    derived = config.to_json()
    for key in ("head_dim", "swa_head_dim", "moe_shared_expert_intermediate_size"):
        values.setdefault(key, derived[key])
    # It only matters for training, and an id outside of the vocabulary stops the embedding from being built.
    if config.pad_token_id >= config.text.vocab_size:
        values["pad_token_id"] = None
    try:
        read = Dots3NoteTextConfig(**values)
    except StrictDataclassError as error:
        raise NotSupportedHere(f"{folder}: transformers refuses this config: {error}") from error
    for kind, parameters in read.rope_parameters.items():
        sizes = read.per_layer_config[kind]
        factor = parameters["partial_rotary_factor"]
        if int(sizes.head_dim * factor) != sizes.qk_rope_head_dim:
            parameters["partial_rotary_factor"] = math.nextafter(factor, math.inf)
    return read


def _load(folder: Path, config: Any, dtype: torch.dtype, names: Iterable[str]) -> tuple[Any, tuple[str, ...]]:
    """The model with the folder's weights, and those of its tensor `names` that are of other parts of the release."""
    from transformers import Dots3NoteForCausalLM

    with quiet() as messages:
        try:
            model, report = Dots3NoteForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            told = "\n".join((str(error), *messages))
            raise CheckpointError(f"{folder}: transformers cannot load it: {told}") from error
    layers = config.num_hidden_layers
    elsewhere = (f"model.layers.{layers}.", "model.mtp.", "vision_encoder.", "audio_encoder.")
    unexpected = set(report["unexpected_keys"])
    if layers < DRAFT_LAYER:
        # Left out of the report: transformers takes these for the draft layer's.
        unexpected |= {name for name in names if name.startswith(f"model.layers.{DRAFT_LAYER}.")}
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unexpected {name}" for name in sorted(unexpected) if not name.startswith(elsewhere)]
    if problems:
        raise CheckpointError(f"{folder}: transformers did not find the text model's tensors: {'; '.join(problems)}")
    return model.eval(), tuple(sorted(name for name in names if name.startswith(elsewhere)))


def _new_cache(config: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if layer.is_sliding:
            layer.activate_past_recording()
    return cache


class _Collected(logging.Handler):
    """Keeps the messages, without their terminal colours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))


@contextmanager
def quiet() -> Iterator[list[str]]:
    """No progress bar and no log on the terminal; gives the list that the messages go to."""
    from transformers.utils import logging as transformers_logging

    collected = _Collected()
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.add_handler(collected)
    try:
        yield collected.messages
    finally:
        transformers_logging.remove_handler(collected)
        transformers_logging.enable_default_handler()
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
