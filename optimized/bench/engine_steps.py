"""Steps of the engine on the four-layer slice with random weights, for `slices` and `generation` to measure.

Weights are drawn on the GPU with the spread of a trained model's (1 / sqrt of the rows they sum over), norms are ones.
Decode steps continue requests whose cached rows are drawn too, from the embedding to the greedy token, which the next
step is fed with on the device; a run of several is waited for once. Afterwards the requests are as long as before, so
that every run does the same work. A prefill step opens and frees its request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.bench.engine_generation import EngineGeneration
from optimized.bench.generation import Generation, GenerationShape
from optimized.bench.profile import Spent, profile_step
from optimized.bench.slices import Steps, StepShape, slice_config
from optimized.device import Backend
from optimized.engine import DecodeItem, Engine, EngineOptions
from optimized.weights import PackedText, empty_text, text_places
from reference.config import NoteConfig, TextConfig
from reference.session import StepItem

PAGE_SIZE = 64
# Decode steps of one run, which ends with the only wait.
CHAINED = 64


class EngineSteps:
    """`make_step(shape)` for `measure_steps`, `generation` for `measure_generations`.

    The weights (38 GB at released geometry) are drawn once.
    """

    def __init__(self, config: NoteConfig, seed: int = 0, device: str = "cuda", backend: Backend | None = None):
        self._config = slice_config(config).text
        self._device, self._backend = torch.device(device), backend
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._weights = drawn_weights(self._config, self._device, seed)

    def __call__(self, shape: StepShape) -> Steps:
        engine = self._engine(shape)
        return self._decode(engine, shape) if shape.batch else self._prefill(engine, shape)

    def generation(self, shape: GenerationShape) -> Generation:
        """From prompts of random tokens, through recorded steps and the draft layer, whose weights are there anyway."""
        engine = self.engine_of(shape.requests, shape.prompt + shape.tokens, True, shape.drafts)
        prompts = {f"request {number}": self._token_ids(shape.prompt) for number in range(shape.requests)}
        run = EngineGeneration(engine, prompts, shape)
        return Generation(run.prompt, run.rounds, run.free)

    def _engine(self, shape: StepShape) -> Engine:
        has_graphs = bool(shape.batch) and not shape.eager
        return self.engine_of(max(1, shape.batch), shape.context + CHAINED, has_graphs)

    def engine_of(self, requests: int, length: int, has_graphs: bool, drafts: int = 0) -> Engine:
        options = EngineOptions(
            pages=requests * (-(-length // PAGE_SIZE) + 1),
            page_size=PAGE_SIZE,
            requests=requests,
            max_draft_tokens=drafts,
            graphs=has_graphs,
        )
        return Engine.from_packed(self._config, self._weights, torch.bfloat16, self._device, self._backend, options)

    def profile(self, shape: StepShape) -> list[Spent]:
        """Where a recorded decode step spends its time. Raises: BenchError as `profile_step`."""
        engine = self._engine(shape)
        steps = self._decode(engine, shape)
        steps.run()
        recorder = engine.runner.recorder
        assert recorder is not None
        recording = recorder.recordings[-1]
        with torch.no_grad():
            return profile_step(lambda see: engine.runner.forward(recording.step, see), recording.replay)

    def _decode(self, engine: Engine, shape: StepShape) -> Steps:
        for pool in (engine.pools.latents, engine.pools.index_keys, engine.pools.rings):
            pool.normal_(generator=self._generator)
        seen = {f"request {number}": self._token_ids(shape.context) for number in range(shape.batch)}
        items = [DecodeItem(name, token_ids[0]) for name, token_ids in seen.items()]

        def reset() -> None:
            for name, token_ids in seen.items():
                if name in engine.requests:
                    engine.free(name)
                engine.pools.open(name)
                engine.pools.grow(name, shape.context)
                engine.adopt(name, token_ids)

        reset()
        count = 1 if shape.eager else CHAINED
        return Steps(lambda: engine.decode(items, count), count, reset)

    def _prefill(self, engine: Engine, shape: StepShape) -> Steps:
        items = [StepItem("prompt", tuple(self._token_ids(shape.context)), "prefill")]

        def step() -> dict[str, Tensor]:
            logits = engine.step(items, last_only=True)
            engine.free("prompt")
            return logits

        return Steps(step)

    def _token_ids(self, count: int) -> list[int]:
        vocabulary = self._config.vocab_size
        return torch.randint(vocabulary, (count,), generator=self._generator, device=self._device).tolist()


def drawn_weights(config: TextConfig, device: torch.device | str, seed: int = 0) -> PackedText:
    """Random bfloat16 weights: matrices with a spread of 1 / sqrt of their width, norms of ones, biases of zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = empty_text(config, device, torch.bfloat16)
    for name, place in text_places(packed).items():
        for piece in place.pieces:
            if piece.dim() == 1:
                piece.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                piece.normal_(0.0, piece.shape[-1] ** -0.5, generator=generator)
    return packed
