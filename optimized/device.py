"""What this machine can do: which implementation each op takes, and why.

One choice an op, made once when a model is built and printable (`note-parity doctor`):

triton   the kernel, compiled on a GPU, or interpreted on a CPU where TRITON_INTERPRET=1 was set before Triton loaded
torch    its twin in plain PyTorch, everywhere else and wherever it is asked for

Nothing falls back silently: a backend that was asked for and cannot run is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch

from optimized.errors import NotSupportedError
from optimized.kernels.common import HAS_TRITON, IS_INTERPRETED

Backend = Literal["triton", "torch"]

# Where each op lives: `NAME_triton` and `NAME_torch` in this module (`NAME_triton_` if it works in place).
OPS = {
    "rms_norm": "optimized.kernels.norm",
    "add_rms_norm": "optimized.kernels.norm",
    "add_parts_rms_norm": "optimized.kernels.norm",
    "write_latents": "optimized.kernels.latent",
    "store_rows": "optimized.kernels.latent",
    "gather_rows": "optimized.kernels.latent",
    "rotate_queries_": "optimized.kernels.queries",
    "norm_rotate_heads_": "optimized.kernels.vision_heads",
    "absorb_queries": "optimized.kernels.queries",
    "unabsorb_gate": "optimized.kernels.gate",
    "gate_heads": "optimized.kernels.gate",
    "swiglu": "optimized.kernels.swiglu",
    "product": "optimized.kernels.products",
    "product_parts": "optimized.kernels.products",
    "product_swiglu": "optimized.kernels.products",
    "embed": "optimized.kernels.embed",
    "feed_tokens": "optimized.kernels.choose",
    "choose_tokens": "optimized.kernels.choose",
    "draft_input": "optimized.kernels.draft",
    "index_scores": "optimized.attention.index_scores",
    "select_keys": "optimized.attention.selection",
    "select_bits": "optimized.attention.selection",
    "sparse_attention": "optimized.attention.absorbed",
    "ring_attention": "optimized.attention.absorbed",
    "expanded_attention": "optimized.attention.expanded",
    "varlen_attention": "optimized.attention.varlen",
    "rotate_halves_": "optimized.kernels.rotate_halves",
    "stem_first": "optimized.kernels.stem",
    "stem_activate_": "optimized.kernels.stem",
    "route": "optimized.kernels.router",
    "sort_rows": "optimized.kernels.experts",
    "expert_swiglu": "optimized.kernels.experts",
    "expert_down": "optimized.kernels.experts",
    "combine": "optimized.kernels.experts",
    "quantize_rows": "optimized.kernels.fp8",
    "fp8_swiglu": "optimized.kernels.experts_fp8",
    "fp8_down": "optimized.kernels.experts_fp8",
    "fp8_combine": "optimized.kernels.experts_fp8",
}


@dataclass(frozen=True)
class Choice:
    """Which backend an op takes, with the reason in words."""

    op: str
    backend: Backend
    reason: str


class Ops:
    """The chosen function of each op as an attribute: `ops.rms_norm(x_TD, weight_D, eps)`."""

    def __init__(self, choices: Mapping[str, Choice]):
        self.choices = dict(choices)
        self._functions: dict[str, Callable[..., Any]] = {
            op: getattr(import_module(OPS[op]), _function_name(op, choice.backend)) for op, choice in choices.items()
        }

    def __getattr__(self, op: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_functions"][op]
        except KeyError:
            raise AttributeError(f"no op {op!r}; there are {', '.join(OPS)}") from None


def choose(device: torch.device | str, backend: Backend | None = None) -> Ops:
    """Choose for `device`; `backend` asks for one backend for every op.

    Raises: NotSupportedError for a backend that is unknown or cannot run here.
    """
    device = torch.device(device)
    obstacle = triton_obstacle(device)
    if backend not in (None, *get_args(Backend)):
        raise NotSupportedError(f"no backend {backend!r}; there are {', '.join(get_args(Backend))}")
    if backend == "triton" and obstacle:
        raise NotSupportedError(f"no op can take triton on {device}: {obstacle}; ask for torch, or for no backend")
    if backend is not None:
        chosen, reason = backend, "asked for"
    elif obstacle:
        chosen, reason = "torch", obstacle
    else:
        chosen, reason = "triton", "interpreted" if device.type == "cpu" else f"compiled for {_card(device)}"
    return Ops({op: Choice(op, chosen, reason) for op in OPS})


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of this device; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu":
        return None if IS_INTERPRETED else "on a CPU only Triton's interpreter runs, and TRITON_INTERPRET=1 is not set"
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if IS_INTERPRETED:
        return "TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def _function_name(op: str, backend: Backend) -> str:
    """`rms_norm_torch`; what works in place keeps its underscore at the end: `rotate_queries_torch_`."""
    return f"{op}{backend}_" if op.endswith("_") else f"{op}_{backend}"


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
