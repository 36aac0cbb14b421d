"""The subcommand `generate`: a prompt with images, sounds and videos, answered by one of three implementations.

Tokens are printed as soon as they are certain; a line on stderr says how many there were, what ended them, which one
won by the smallest margin (in logits; within their rounding two implementations or dtypes may part there), and how many
drafts were kept. Given the logits a token is a function of seed and position, so implementations can be compared by
their output also when it is sampled. See `cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from reference.generate import Generation
    from reference.prompt import ChatTokenizer
    from reference.prompt_tokens import TextStream


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the user says.")],
    checkpoint: Annotated[Path, typer.Option(metavar="DIR", help="Weights, tokenizer.json, generation_config.json.")],
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="May be repeated.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="May be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="One, and no other media.")] = None,
    impl: Annotated[
        Literal["reference", "optimized", "transformers"],
        typer.Option(help="transformers has no drafts."),
    ] = "reference",
    dtype: Annotated[
        Literal["bfloat16", "float32", "float64"],
        typer.Option(help="Of weights and activations; compare implementations in float32 or float64."),
    ] = "bfloat16",
    numerics: Annotated[
        Literal["default", "transformers", "vllm"],
        typer.Option(help="How the reference rounds; in bfloat16 as transformers, it has the bits of transformers."),
    ] = "default",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it runs.")] = "cpu",
    backend: Annotated[
        Literal["torch", "triton"] | None,
        typer.Option(help="What the optimized one's ops take; by itself, see `note-parity doctor`."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="TOKENS")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; the model's card has 1.0.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Above 0, at most 1; the model's card has 0.95.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    draft_depth: Annotated[int, typer.Option(min=0, metavar="TOKENS", help="Drafts a round; changes no token.")] = 0,
    thinking: Annotated[bool, typer.Option(help="Whether the model may think before it answers.")] = True,
    video_convention: Annotated[
        Literal["interleaved", "padded"],
        typer.Option(help="Frames with time stamps and sound as in training, or as transformers' processor."),
    ] = "interleaved",
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids in place of text.")] = False,
) -> None:
    """Answer a prompt, token by token; greedy, or sampled with --temperature and --top-p."""
    import torch

    from parity.generation import (
        DTYPES,
        REQUEST,
        MediaFiles,
        Streamed,
        generator,
        read_media,
        refuse,
        write_prompt,
    )
    from reference.config import NoteConfig
    from reference.generate import generate as run_rounds
    from reference.prompt import ChatTokenizer
    from reference.prompt_stop import read_stop_ids
    from reference.prompt_tokens import TextStream
    from reference.sampling import Sampling

    sampling = Sampling(temperature, top_p, seed)
    files = MediaFiles(image or (), audio or (), video or ())
    refuse(impl, device, draft_depth, numerics)
    config = NoteConfig.from_json(checkpoint / "config.json")
    tokenizer = ChatTokenizer.open(checkpoint, config)
    stop_ids = read_stop_ids(checkpoint)
    media = read_media(files, checkpoint, config, prompt, video_convention, max_new_tokens)
    written = write_prompt(prompt, files, media, tokenizer, config, thinking, max_new_tokens)
    stream = TextStream(lambda token_id: _token(tokenizer, token_id))
    with torch.no_grad():
        session = generator(
            impl, checkpoint, written, media, DTYPES[dtype], device, draft_depth, max_new_tokens, backend, numerics
        )
        streamed = Streamed(session, _printer(stream, ids))
        made = run_rounds(streamed, {REQUEST: written.ids}, max_new_tokens, draft_depth, stop_ids, sampling)
    tokens = made.tokens[REQUEST]
    streamed.finish(tokens)
    typer.echo("" if ids else stream.finish())
    ending = _token(tokenizer, tokens[-1]) if tokens[-1] in stop_ids else "the limit"
    typer.echo(_summary(len(written.ids), len(tokens), ending, made), err=True)


def _printer(stream: TextStream, has_ids: bool) -> Callable[[Sequence[int]], None]:
    def show(tokens: Sequence[int]) -> None:
        typer.echo("".join(f"{token} " for token in tokens) if has_ids else stream.feed(tokens), nl=False)

    return show


def _token(tokenizer: ChatTokenizer, token_id: int) -> str:
    """Its text; the model has more rows than the tokenizer has tokens, so it may write one that has none."""
    from reference.prompt_messages import PromptError

    try:
        return tokenizer.token(token_id)
    except PromptError:
        return f"<no token {token_id}>"


def _summary(prompt: int, tokens: int, ending: str, made: Generation) -> str:
    places = [f"{kept} of {tried}" for kept, tried in zip(made.accepted, made.tried, strict=True)]
    drafts = f"; drafts kept, place by place: {', '.join(places)}" if places else ""
    closest = made.closest
    margin = f"; closest choice: token {closest.index}, by {closest.margin:.2e}" if closest else ""
    return f"{prompt} tokens in the prompt, {tokens} new ones, ended by {ending}{margin}{drafts}"
