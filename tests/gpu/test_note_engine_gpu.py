"""The whole optimized model on a GPU: requests that begin with media, recorded steps and drafts behind them.

Logits within the noise that the eager reference has in bfloat16; greedy text as the reference's but for near ties.
"""

from __future__ import annotations

import torch

from optimized.engine import EngineOptions
from optimized.model import NoteEngine
from reference.checkpoint import synthetic_tensors
from reference.generate import first_parting, generate
from reference.media.image import Patches
from reference.media.mel import features
from reference.model import NoteModel, NoteSession
from reference.model_media import ImageInput, MediaInput, SoundInput
from reference.model_tiny import tiny_note
from reference.session import StepItem

CONFIG = tiny_note()
WEIGHTS = dict(synthetic_tensors(CONFIG))
IMAGE, AUDIO = CONFIG.image_token_id, CONFIG.audio_token_id
IDS = (5, *[IMAGE] * 6, 7, 8, *[AUDIO] * 8, 9, 10, 11)
PROMPTS = {"a": IDS, "b": tuple(range(40, 61))}
NEW_TOKENS = 12


def media() -> list[MediaInput]:
    source = torch.Generator().manual_seed(1)
    picture = Patches(torch.randn(24, 3 * 14 * 14, generator=source), torch.tensor([[1, 4, 6]]))
    return [ImageInput(picture), SoundInput(features(0.1 * torch.randn(9000, generator=source), CONFIG.audio))]


def session(dtype: torch.dtype) -> NoteSession:
    model = NoteModel(CONFIG)
    model.load_state_dict(WEIGHTS)
    one = NoteSession(model.to(dtype).requires_grad_(False))
    one.place("a", IDS, media())
    return one


def engine() -> NoteEngine:
    weights = {
        name: tensor if name.endswith(("e_score_correction_bias", "router_bias")) else tensor.to(torch.bfloat16)
        for name, tensor in WEIGHTS.items()
    }
    options = EngineOptions(pages=16, requests=4, graphs=True)
    one = NoteEngine.from_state(CONFIG, weights, torch.bfloat16, "cuda", options=options)
    one.place("a", IDS, media())
    return one


def test_prompts_with_media_and_drafts_behind_them() -> None:
    items = [StepItem(name, ids, "prefill") for name, ids in PROMPTS.items()]
    truth, eager = session(torch.float64).step(items), session(torch.bfloat16).step(items)
    found = {name: logits.cpu() for name, logits in engine().step(items).items()}
    for name, exact_TW in truth.items():
        noise = float((eager[name].double() - exact_TW).norm())
        assert float((found[name].double() - exact_TW).norm()) <= 2.5 * noise, name
    expected = generate(session(torch.bfloat16), PROMPTS, NEW_TOKENS)
    error = max(float((eager[name].double() - exact_TW).abs().max()) for name, exact_TW in truth.items())
    for depth in (0, 3):
        made = generate(engine(), PROMPTS, NEW_TOKENS, depth)
        for name in PROMPTS:
            parting = first_parting(expected, made, name)
            assert parting is None or parting.margin <= 4.0 * error, (depth, parting)
