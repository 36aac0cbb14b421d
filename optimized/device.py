"""What this machine can do: which implementation each op takes, and why.

One choice an op, made once when a model is built and printable (`note-parity doctor`):

triton   the kernel, compiled on a GPU, or interpreted on a CPU where TRITON_INTERPRET=1 was set before Triton loaded
torch    its twin in plain PyTorch, everywhere else and wherever it is asked for
package  an optional package on a GPU, for the sizes at which it is faster than the kernel, where packages are let in

Attention has two kernels behind an op: one for Hopper and the released sizes, one for all. Which of them runs depends
on the tensors of a call, so the reason says what there is. Nothing falls back silently: a backend that was asked for
and cannot run is an error, and the reason says which package is taken or why it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import torch

from optimized.attention.flash_mla import FEWEST_TOKENS
from optimized.attention.one_pass import FEWEST_RING_TOKENS, has_hopper_kernels
from optimized.attention.pipelined import FEWEST_QUERIES
from optimized.errors import NotSupportedError
from optimized.kernels.common import HAS_TRITON, IS_INTERPRETED
from optimized.packages import FLASH_MLA, OptionalPackage, status_of

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
# What the kernels for Hopper do otherwise than those for all; bfloat16 of the released sizes takes them.
HOPPER_OPS = {
    "sparse_attention": "one pass over the rows in place of two",
    "ring_attention": f"one pass over the rows in place of two, from {FEWEST_RING_TOKENS} tokens on",
    "expanded_attention": f"products that overlap, from {FEWEST_QUERIES} queries on",
}


class Packaged(NamedTuple):
    """What an op may take, where its `NAME_package` lives, and for what that takes it; all else is the kernel's."""

    package: OptionalPackage
    module: str
    when: str


PACKAGED = {
    "sparse_attention": Packaged(
        FLASH_MLA, "optimized.attention.flash_mla", f"bfloat16 of the released sizes from {FEWEST_TOKENS} tokens on"
    )
}


@dataclass(frozen=True)
class Choice:
    """Which backend an op takes, with the reason in words."""

    op: str
    backend: Backend | Literal["package"]
    reason: str


class Ops:
    """The chosen function of each op as an attribute: `ops.rms_norm(x_TD, weight_D, eps)`."""

    def __init__(self, choices: Mapping[str, Choice]):
        self.choices = dict(choices)
        self._functions: dict[str, Callable[..., Any]] = {
            op: getattr(import_module(_module(choice)), _function_name(choice)) for op, choice in choices.items()
        }

    def __getattr__(self, op: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_functions"][op]
        except KeyError:
            raise AttributeError(f"no op {op!r}; there are {', '.join(OPS)}") from None


def choose(device: torch.device | str, backend: Backend | None = None, packages: bool = False) -> Ops:
    """Choose for `device`; `backend` asks for one backend for every op, else `packages` lets in those that work here.

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
    choices = {op: Choice(op, chosen, reason) for op in OPS}
    if chosen == "triton":
        choices |= {op: _of_two_kernels(choices[op], device) for op in HOPPER_OPS}
    if packages and backend is None and chosen == "triton" and device.type == "cuda":
        choices |= {op: _with_package(choices[op], packaged) for op, packaged in PACKAGED.items()}
    return Ops(choices)


def _of_two_kernels(kernel: Choice, device: torch.device) -> Choice:
    """The same choice, with what a kernel for Hopper does where there is one."""
    if has_hopper_kernels(device):
        said = f"released sizes in bfloat16 take the kernel for Hopper: {HOPPER_OPS[kernel.op]}"
    else:
        said = "one kernel for all sizes, none for Hopper"
    return Choice(kernel.op, kernel.backend, f"{kernel.reason}; {said}")


def _with_package(kernel: Choice, packaged: Packaged) -> Choice:
    """The package's choice if it works on this machine, else the kernel's, with the reason."""
    status = status_of(packaged.package)
    if not status.works:
        return Choice(kernel.op, kernel.backend, f"{kernel.reason}; not {status.distribution}: {status.detail}")
    reason = f"{status.distribution} {status.detail} for {packaged.when}; else triton, {kernel.reason}"
    return Choice(kernel.op, "package", reason)


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


def _module(choice: Choice) -> str:
    return PACKAGED[choice.op].module if choice.backend == "package" else OPS[choice.op]


def _function_name(choice: Choice) -> str:
    """`rms_norm_torch`; what works in place keeps its underscore at the end: `rotate_queries_torch_`."""
    op, backend = choice.op, choice.backend
    return f"{op}{backend}_" if op.endswith("_") else f"{op}_{backend}"


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
