"""Optional packages with faster kernels: what is installed, what it was built with, and whether it can be trusted here.

None is needed. Each is imported only where it is used; a package that loads is not one that works, so each is called
once on a small case and compared before it is offered.

fa3-fwd          (fa3_fwd_interface)     FlashAttention-3 built for 192/128 heads and no windows: full layers, dense
tokenspeed-fa3   (flash_attn_interface)  FlashAttention-3 built with windows and 256 lanes: sliding layers
sgl-flash-mla    (flash_mla)             FlashMLA with the kernels for Hopper: full layers, selected rows

The engine takes the last one (`EngineOptions.packages`, `attention.flash_mla`); the others are peers of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

# T tokens  H heads  X query/key width  V value width  L latent row [C | rope]  C kv latent  K listed rows  S pool rows

# Error that a trusted bfloat16 kernel may have against plain float32 attention, relative to the largest value.
SMALL_CASE_LIMIT = 2.0**-6


@dataclass(frozen=True)
class OptionalPackage:
    """`module` is imported; `needed`: build flags that must be off in `config_module`, each with what it leaves out."""

    distribution: str
    module: str
    use: str
    small_case: Callable[[], None]
    config_module: str | None = None
    needed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PackageStatus:
    """`works` says that its small case was run and is right. `detail` is its version, or why it is not used."""

    distribution: str
    use: str
    works: bool
    detail: str


def status_of(package: OptionalPackage) -> PackageStatus:
    """Look, import, read the build flags, call once. Never raises: what went wrong is the detail."""

    def found(works: bool, detail: str) -> PackageStatus:
        return PackageStatus(package.distribution, package.use, works, detail)

    if find_spec(package.module) is None:
        return found(False, "not installed")
    try:
        import_module(package.module)
        flags = _build_flags(package.config_module)
    except Exception as error:  # a binary built for another torch fails in many ways
        return found(False, f"does not load: {type(error).__name__}: {error}")
    for flag, why in package.needed:
        if flags.get(flag):
            return found(False, f"built with {flag}: {why}")
    if not torch.cuda.is_available():
        return found(False, "needs CUDA")
    try:
        package.small_case()
    except Exception as error:
        return found(False, f"fails its small case: {type(error).__name__}: {error}")
    try:
        return found(True, version(package.distribution))
    except PackageNotFoundError:
        return found(True, "version unknown")


def _build_flags(config_module: str | None) -> dict[str, bool]:
    if config_module is None or find_spec(config_module) is None:
        return {}
    return dict(getattr(import_module(config_module), "CONFIG", {}).get("build_flags", {}))


def _attention_is_right(
    attention: Callable[..., Tensor], heads: int, width: int, value: int, window: int | None
) -> None:
    """Raises: AssertionError unless `attention` gives plain causal attention on 70 random tokens."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(lanes: int) -> Tensor:
        return torch.randn(70, heads, lanes, generator=generator, device="cuda").bfloat16()

    q_THX, k_THX, v_THV = drawn(width), drawn(width), drawn(value)
    starts_B1 = torch.tensor([0, 30, 70], device="cuda", dtype=torch.int32)
    out_THV = attention(q_THX, k_THX, v_THV, starts_B1, starts_B1, 40, 40, width**-0.5, window)
    for start, stop in ((0, 30), (30, 70)):
        q, k, v = (x[start:stop].float().transpose(0, 1) for x in (q_THX, k_THX, v_THV))
        position = torch.arange(stop - start, device="cuda")
        visible = position <= position[:, None]
        if window is not None:
            visible &= position > position[:, None] - window
        scores = (q @ k.mT * width**-0.5).masked_fill(~visible, float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        error = (out_THV[start:stop].float() - expected).abs().max() / expected.abs().max()
        assert error < SMALL_CASE_LIMIT, f"relative error {float(error):.1e} against plain attention"


def fa3_dense(
    q_THX: Tensor,
    k_SHX: Tensor,
    v_SHV: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention through fa3-fwd, ragged; queries are the last rows of their request's keys. bfloat16."""
    interface = import_module("fa3_fwd_interface")
    return _first(
        interface.flash_attn_varlen_func(
            q_THX,
            k_SHX,
            v_SHV,
            query_start_B1,
            key_start_B1,
            max_queries,
            max_keys,
            softmax_scale=scale,
            causal=True,
        )
    )


def fa3_window(
    q_THX: Tensor,
    k_SHX: Tensor,
    v_SHV: Tensor,
    query_start_B1: Tensor,
    key_start_B1: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """As `fa3_dense`, through tokenspeed-fa3, with a window that counts the query. V is padded to the width of K."""
    interface = import_module("flash_attn_interface")
    X, V = q_THX.shape[-1], v_SHV.shape[-1]
    out_THX = _first(
        interface.flash_attn_varlen_func(
            q_THX,
            k_SHX,
            torch.nn.functional.pad(v_SHV, (0, X - V)),
            query_start_B1,
            key_start_B1,
            max_queries,
            max_keys,
            softmax_scale=scale,
            causal=True,
            # Counts the keys before the query.
            window_size=(-1 if window is None else window - 1, 0),
        )
    )
    return out_THX[..., :V]


def flash_mla_sparse(q_THL: Tensor, pool_SL: Tensor, row_TK: Tensor, length_T: Tensor, scale: float, C: int) -> Tensor:
    """Each token's attention to the rows listed for it, keys in all lanes, values in the first C, through FlashMLA.

    q_THL, pool_SL: bfloat16, H 64 or 128, L 576, C 512; row_TK: int32, -1 for none, K a multiple of 128; length_T:
    int32, at least 1, up to which place of its list a token has rows. Returns [T, H, C]; zeros where nothing is listed.
    """
    interface = import_module("flash_mla")
    # The kernels for Hopper are called legacy; without the sums of the softmax, which nobody asks for.
    return interface.flash_mla_sparse_fwd(
        q_THL, pool_SL[:, None], row_TK[:, None], scale, C, topk_length=length_T, use_legacy=True, return_log2_lse=False
    )[0]


def _listed_attention_is_right() -> None:
    """Raises: AssertionError unless `flash_mla_sparse` gives plain attention, on lists with gaps and one of nothing."""
    T, H, L, C, K, S = 5, 128, 576, 512, 256, 300
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    q_THL, pool_SL, scale = drawn(T, H, L), drawn(S, L), L**-0.5
    order_TS = torch.rand(T, S, generator=generator, device="cuda").argsort(-1)
    slot_K = torch.arange(K, device="cuda")
    length_T = torch.tensor([K, 1, 0, 77, 130], device="cuda", dtype=torch.int32)
    is_listed_TK = (slot_K < length_T[:, None]) & ((slot_K % 7 > 0) | (slot_K == length_T[:, None] - 1))
    row_TK = torch.where(is_listed_TK, order_TS[:, :K], -1).int()
    out_THC = flash_mla_sparse(q_THL, pool_SL, row_TK, length_T.clamp(min=1), scale, C).float()
    assert not out_THC[2].any(), "a token without rows is not zero"
    for token in (0, 1, 3, 4):
        rows_KL = pool_SL[row_TK[token][is_listed_TK[token]].long()].float()
        expected_HC = (q_THL[token].float() @ rows_KL.T * scale).softmax(-1) @ rows_KL[:, :C]
        error = (out_THC[token] - expected_HC).abs().max() / expected_HC.abs().max()
        assert error < SMALL_CASE_LIMIT, f"relative error {float(error):.1e} against plain attention"


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


FA3_DENSE = OptionalPackage(
    "fa3-fwd",
    "fa3_fwd_interface",
    "full layers, prefill without a selection",
    lambda: _attention_is_right(fa3_dense, 4, 192, 128, None),
    "fa3_fwd_config",
    (("FLASHATTENTION_DISABLE_HDIM192", "heads of 192 lanes are left out"),),
)
FA3_WINDOW = OptionalPackage(
    "tokenspeed-fa3",
    "flash_attn_interface",
    "sliding layers, prefill",
    lambda: _attention_is_right(fa3_window, 4, 256, 128, 9),
    "flash_attn_config",
    (
        ("FLASHATTENTION_DISABLE_LOCAL", "windows are left out"),
        ("FLASHATTENTION_DISABLE_HDIM256", "heads of 256 lanes are left out"),
    ),
)
FLASH_MLA = OptionalPackage(
    "sgl-flash-mla",
    "flash_mla",
    "full layers, selected rows",
    _listed_attention_is_right,
)
PACKAGES = (FA3_DENSE, FA3_WINDOW, FLASH_MLA)
