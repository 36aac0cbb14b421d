"""A small tokenizer, a template and messages for the tests of prompts.

The template is written from the specification's rules, as the checkpoint's file is not at hand.
"""

import unicodedata
from pathlib import Path
from typing import Any

from reference.prompt import TURN_MARKERS
from reference.prompt_render import ToolsText

MEDIA_MARKERS = (
    "<|img|>", "<|imgpad|>", "<|endofimg|>", "<|audio_comp_start|>", "<|audio_comp_end|>", "<|audio_comp_pad|>",
    "<|video_pad|>",
)  # fmt: skip
ADDED = ("<|endoftext|>", *TURN_MARKERS, *MEDIA_MARKERS, "<dots_function_call>")
TOOLS_TEXT = ToolsText("\n\n# Tools\n<tools>", "\n</tools>\n\nFormat.")
START = "<|system|>You are a helpful assistant.<|endofsystem|>"

# The specification's section 3 as a template, in the manner of released ones.
TEMPLATE = r"""
{%- set thinking = not (enable_thinking is defined and enable_thinking is false) %}
{%- set is_first_system = messages[0].role == 'system' %}
{{- '<|system|>' + (messages[0].content if is_first_system else 'You are a helpful assistant.') }}
{%- if tools %}
{{- '\n\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nFormat.' }}
{%- endif %}
{{- '<|endofsystem|>' }}
{%- for message in (messages[1:] if is_first_system else messages) %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = '</think>'.join(content.split('</think>')[1:]).lstrip('\n') %}
{%- endif %}
{{- '<|assistant|>' }}
{%- if not thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- elif reasoning %}{{- '<think>\n' + reasoning.strip() + '\n</think>\n\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<dots_function_call>\n<invoke name="' + call.function.name + '">' }}
{%- for key, value in call.function.arguments.items() %}
{{- '\n<parameter name="' + key + '">\n' + (value if value is string else (value | tojson)) + '\n</parameter>' }}
{%- endfor %}
{{- '\n</invoke>\n</dots_function_call>' }}
{%- endfor %}
{{- '<|endofassistant|>' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|user|>' }}{%- endif %}
{{- '\n<dots_function_response>\n' + message.content + '\n</dots_function_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|endofuser|>' }}{%- endif %}
{%- else %}
{{- '<|user|>' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text if part.type == 'text' else '<|img|><|imgpad|><|endofimg|>' }}
{%- endfor %}
{%- endif %}
{%- if message.role == 'user' and not thinking and not (message.content is string and
 message.content.endswith('<no_think>')) %}{{- '<no_think>' }}{%- endif %}
{{- '<|endofuser|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' + ('' if thinking else '<think>\n\n</think>\n\n') }}{%- endif %}
"""


def write_tokenizer(path: Path) -> None:
    """All bytes, a few merges, NFC, and the added tokens; two of those are not `special`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["You are a helpful assistant. <no_think> < Hi Hi\n\n think user\n\n"] * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, special="think" not in text, normalized=False) for text in ADDED])
    tokenizer.save(str(path))


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def nfc(text: str) -> str:
    """Piece by piece as the tokenizer normalises: markers are ASCII, so the whole text's form is the same."""
    return unicodedata.normalize("NFC", text)
