"""The smallest whole model: the tiny text model with both towers, and a vocabulary that holds a tokenizer of bytes.

Patches are 14 pixels wide, merged two by two, as the released preprocessing makes them; all else is that of the tiny
parts. Files and chats go through it as through the release, so that everything between a message and a tool call runs
on any machine in seconds.
"""

from dataclasses import replace

from reference.audio import tiny_audio
from reference.config import NoteConfig, tiny
from reference.vision import tiny_vision


def tiny_note() -> NoteConfig:
    """The stop ids are <|endoftext|> and <|endofassistant|>; a sound's pad comes behind its two delimiters."""
    return replace(
        tiny(),
        text=replace(tiny().text, vocab_size=281),
        vision=replace(tiny_vision(), patch_size=14),
        audio=tiny_audio(),
        bos_token_id=256,
        eos_token_ids=(256, 262),
        pad_token_id=275,
        image_token_id=266,
        audio_token_id=272,
        video_token_id=274,
    )
