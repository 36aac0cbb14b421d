"""The oracle of the audio side: transformers 5.24's feature extractor and audio tower.

The tower reads the released-layout folder itself, with its own config class and its own weight converter. A clip is
given to it as what the reference decodes, mixes and resamples it to, because transformers does none of that; features,
chunks and lengths are its own. Its tensors are shown under the schema's names, without the rows that it computes for
padding, one chunk of a clip after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parity.audio_clips import Heard
from parity.exact import LowerPrecisionOp, exact
from parity.runners import NotSupportedHere
from parity.runners.transformers import SUPPORTED_VERSION, quiet, require_transformers
from reference.audio import Chunk
from reference.checkpoint.load_audio import PREFIX
from reference.config import AudioConfig, NoteConfig
from reference.errors import CheckpointError
from reference.media.mel import HOP, STRIDES, token_count
from reference.probe import is_observed

# N chunks  L frames  M mel bins  C channels  P rows of frequencies  T tokens
# H heads  X lanes of a head


class TransformersAudio:
    """transformers' audio tower. `dtype` is that of weights and activations; with `exact_mode` all runs in float64, and
    `lower_precision_ops` lists what did not.

    Raises: RunnerUnavailable without transformers 5.24; NotSupportedHere for a single mel bin;
    CheckpointError for a folder without an audio tower, or where its tensors are not found.
    """

    name = f"transformers {SUPPORTED_VERSION}"

    def __init__(self, folder: str | Path, dtype: torch.dtype, exact_mode: bool = False):
        require_transformers()
        self.config = _audio_config(Path(folder))
        self.dtype = torch.float64 if exact_mode else dtype
        self.lower_precision_ops: list[LowerPrecisionOp] = []
        self._exact = exact_mode
        with self._precision():
            self.extractor = _extractor(self.config)
            self.model = _load(Path(folder), self.dtype)

    def features(self, clip: Heard) -> tuple[Tensor, tuple[int, ...]]:
        """Log-mel features [N, M, L] (frames up to the last token of the longest chunk), and the samples of chunks."""
        rate = self.config.sampling_rate
        waveform_S = clip.waveform(rate)
        with self._precision():
            made = self.extractor(waveform_S, sampling_rate=rate)
        return made["input_features"], tuple(made["chunk_sample_lengths"].tolist())

    def embed(self, clip: Heard) -> Tensor:
        """[tokens, O] in `dtype`. Raises: NotSupportedHere if a listener replaces a value."""
        mel_NML, samples = self.features(clip)
        full = self.config.sampling_rate * self.config.chunk_seconds
        chunks = [Chunk(clip.name, index, count, full // HOP) for index, count in enumerate(samples)]
        with torch.no_grad(), self._precision():
            if not is_observed():
                return self.model(mel_NML.to(self.dtype), torch.tensor(samples)).pooler_output
            shown: list[tuple[str, int, Tensor]] = [("mel", 0, mel_NML.transpose(1, 2))]
            with _noted(self.model, shown):
                output = self.model(mel_NML.to(self.dtype), torch.tensor(samples)).pooler_output
            _show(shown, chunks)
            return output

    @contextmanager
    def _precision(self) -> Iterator[None]:
        with exact() if self._exact else nullcontext() as spy:
            yield
        if spy:
            self.lower_precision_ops += spy.lower_precision_ops


def _audio_config(folder: Path) -> AudioConfig:
    audio = NoteConfig.from_json(folder / "config.json").audio
    if audio is None:
        raise CheckpointError(f"{folder}: has no audio tower: its config.json lacks audio_config")
    if audio.num_mel_bins == 1:
        raise NotSupportedHere(f"transformers {SUPPORTED_VERSION} cannot run one mel bin: it takes it for no dimension")
    return audio


def _extractor(config: AudioConfig) -> Any:
    from transformers.models.dots3_note.feature_extraction_dots3_note import Dots3NoteFeatureExtractor

    return Dots3NoteFeatureExtractor(
        feature_size=config.num_mel_bins, sampling_rate=config.sampling_rate, chunk_seconds=config.chunk_seconds
    )


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteAudioConfig
    from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteAudioModel

    read = Dots3NoteAudioConfig(**NoteConfig.from_json(folder / "config.json").to_json()["audio_config"])
    with quiet() as messages:
        try:
            model, report = Dots3NoteAudioModel.from_pretrained(
                folder,
                config=read,
                dtype=dtype,
                key_mapping={rf"^{PREFIX}": ""},
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            told = "\n".join((str(error), *messages))
            raise CheckpointError(f"{folder}: transformers cannot load its audio tower: {told}") from error
    others = ("model.", "lm_head.", "vision_encoder.")
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unexpected {name}" for name in sorted(report["unexpected_keys"]) if not name.startswith(others)]
    if problems:
        raise CheckpointError(f"{folder}: transformers did not find the audio tower's tensors: {'; '.join(problems)}")
    return model.eval()


@contextmanager
def _noted(model: Any, shown: list[tuple[str, int, Tensor]]) -> Iterator[None]:
    """Notes (name, convolutions passed, tensor [N, rows, …]) of every named tensor of a forward inside."""
    from transformers.models.dots3_note import modeling_dots3_note as modeling

    def note(name: str, value: Tensor, stage: int = STRIDES) -> None:
        shown.append((name, stage, value.detach().clone()))

    def noted_mask(mask: Callable) -> Callable:
        names = iter(("stem.input", "stem.conv1", "stem.conv2", "stem.conv3"))

        def masked(x_NCLP: Tensor, lengths: Tensor) -> Tensor:
            result_NCLP = mask(x_NCLP, lengths)
            name = next(names)
            note(name, result_NCLP.transpose(1, 2), int(name[-1]) if name[-1].isdigit() else 0)
            return result_NCLP

        return masked

    def noted_attention(attend: Callable) -> Callable:
        indices = iter(range(len(model.layers)))

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = attend(module, query, key, value, *args, **kwargs)
            name = f"layers.{next(indices)}.attn"
            for part, x_NHTX in (("query", query), ("key", key), ("value", value)):
                note(f"{name}.{part}", x_NHTX.transpose(1, 2))
            note(f"{name}.core", result[0])
            return result

        return attention

    with ExitStack() as stack:
        for owner_name, wrap in (
            ("_mask_subsampled_frames", noted_mask),
            ("eager_attention_forward", noted_attention),
        ):
            replacement = wrap(getattr(modeling, owner_name))
            stack.enter_context(mock.patch.object(modeling, owner_name, replacement))

        def on_output(name: str, module: nn.Module) -> None:
            hook = module.register_forward_hook(lambda module, args, output: note(name, _first(output)))
            stack.callback(hook.remove)

        def on_input(name: str, module: nn.Module) -> None:
            hook = module.register_forward_pre_hook(lambda module, args: note(name, args[0]))
            stack.callback(hook.remove)

        on_output("stem", model.conv_stem.conv_out)
        for index, layer in enumerate(model.layers):
            name = f"layers.{index}"
            on_input(f"{name}.input", layer)
            on_output(f"{name}.attn.input", layer.input_layernorm)
            on_output(f"{name}.attn.output", layer.self_attn)
            on_output(f"{name}.ffn.input", layer.post_attention_layernorm)
            on_input(f"{name}.ffn.activated", layer.mlp.down_proj)
            on_output(f"{name}.ffn.output", layer.mlp)
            on_output(f"{name}.output", layer)
        on_output("final_norm", model.layer_norm)
        on_output("adapter.input", model.adapter.norm)
        on_output("adapter.hidden", model.adapter.activation)
        on_output("adapted", model.adapter)
        yield


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _show(shown: list[tuple[str, int, Tensor]], chunks: list[Chunk]) -> None:
    """Chunk after chunk, the rows of its tokens. The adapter has no padding: its rows are those of all tokens."""
    tokens = [token_count(chunk.samples) for chunk in chunks]
    for name, stage, value in shown:
        packed = value.split(tokens) if name.startswith("adapt") else value
        for chunk, count, value_RX in zip(chunks, tokens, packed, strict=True):
            kept = value_RX[: count << (STRIDES - stage)]
            if chunk.shown(f"audio.{name}", kept, stage) is not kept:
                raise NotSupportedHere(f"audio.{name}: transformers shows its values; a listener cannot replace them")
