"""Optional packages: what is said of one that is not there or does not work, and FlashMLA's part of the full layers.

A stand-in with the package's interface runs here, so that what is handed to it is tested without a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, check_against_twin
from poison import poisoned
from torch import Tensor

from optimized import device, engine, packages
from optimized.attention import flash_mla
from optimized.attention.absorbed import sparse_attention_torch
from optimized.attention.flash_mla import pool_rows_torch, pool_rows_triton, sparse_attention_package
from optimized.packages import OptionalPackage, PackageStatus, status_of
from parity.engine_check import OPTIONS, check_optimized
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import MlaGeometry, NoteConfig, tiny

# T tokens  H heads  L row  C latent  K listed rows  S rows of the pool

H, L, C, PAGE = 64, 576, 512, 4
LENGTHS = (1, 9, 40, 40, 17)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    """Installs a module with these attributes for the duration of a test."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    monkeypatch.setitem(sys.modules, name, made)


def broken() -> None:
    raise AssertionError("wrong numbers")


def package(small_case=lambda: None) -> OptionalPackage:
    flags = (("NO_WINDOWS", "windows are left out"),)
    return OptionalPackage("the-distribution", "the_module", "a use", small_case, "the_config", flags)


def detail(found: PackageStatus) -> str:
    assert not found.works
    assert (found.distribution, found.use) == ("the-distribution", "a use")
    return found.detail


def test_a_package_is_offered_only_after_it_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detail(status_of(package())) == "not installed"
    module(monkeypatch, "the_module")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detail(status_of(package())) == "needs CUDA"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert detail(status_of(package(broken))) == "fails its small case: AssertionError: wrong numbers"
    assert status_of(package()) == PackageStatus("the-distribution", "a use", True, "version unknown")
    module(monkeypatch, "the_config", CONFIG={"build_flags": {"NO_WINDOWS": True}})
    assert detail(status_of(package())) == "built with NO_WINDOWS: windows are left out"

    def import_module(name: str) -> ModuleType:
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(packages, "import_module", import_module)
    assert detail(status_of(package())) == "does not load: OSError: the_module: undefined symbol"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices as where kernels are compiled, with a package that works."""
    monkeypatch.setattr(device, "triton_obstacle", lambda _: None)
    monkeypatch.setattr(device, "_card", lambda _: "a card")
    monkeypatch.setattr(device, "status_of", lambda found: PackageStatus(found.distribution, found.use, True, "1.2"))


@pytest.mark.usefixtures("on_a_gpu")
def test_a_package_that_works_is_chosen_where_packages_are_let_in() -> None:
    ops = device.choose("cuda", packages=True)
    chosen = ops.choices["sparse_attention"]
    assert chosen.backend == "package"
    assert chosen.reason.split("; ")[:2] == [
        "sgl-flash-mla 1.2 for bfloat16 of the released sizes from 40 tokens on",
        "else triton, compiled for a card",
    ]
    assert ops.sparse_attention is sparse_attention_package
    assert {choice.backend for op, choice in ops.choices.items() if op != "sparse_attention"} == {"triton"}
    for other in (device.choose("cuda"), device.choose("cuda", "triton", packages=True)):
        assert other.choices["sparse_attention"].backend == "triton"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_package_that_does_not_work_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "status_of", lambda found: PackageStatus(found.distribution, found.use, False, "torn"))
    chosen = device.choose("cuda", packages=True).choices["sparse_attention"]
    assert chosen.backend == "triton"
    assert (chosen.reason.split("; ")[0], chosen.reason.split("; ")[-1]) == (
        "compiled for a card",
        "not sgl-flash-mla: torn",
    )


@pytest.mark.parametrize(
    ("options", "lets_in"), [({}, True), ({"packages": False}, False), ({"batch_invariant": True}, False)]
)
def test_the_engine_lets_packages_in_unless_told(monkeypatch: pytest.MonkeyPatch, options: dict, lets_in: bool) -> None:
    asked = []

    def choose(*arguments: object, packages: bool) -> device.Ops:
        asked.append(packages)
        return device.choose(*arguments)

    monkeypatch.setattr(engine, "choose", choose)
    config = tiny()
    engine.Engine.from_state(
        config.text,
        synthetic_tensors(config),
        torch.bfloat16,
        DEVICE,
        "torch",
        engine.EngineOptions(pages=8, requests=2, **options),
    )
    assert asked == [lets_in]


def plain_sparse_fwd(
    q_THL: Tensor,
    pool_S1L: Tensor,
    row_T1K: Tensor,
    scale: float,
    d_v: int,
    *,
    topk_length: Tensor,
    use_legacy: bool,
    return_log2_lse: bool,
) -> tuple[Tensor, None, None]:
    """The package's function by its documentation."""
    assert use_legacy
    assert not return_log2_lse
    assert q_THL.shape[1:] in ((64, L), (128, L))
    assert pool_S1L.shape[1:] == (1, L)
    assert d_v == C
    assert row_T1K.dtype == topk_length.dtype == torch.int32
    assert row_T1K.shape[-1] % 128 == 0
    assert row_T1K.shape[1] == 1
    assert topk_length.min() >= 1
    row_TK = row_T1K[:, 0].long()
    assert row_TK.max() < len(pool_S1L)
    is_live_TK = (row_TK >= 0) & (torch.arange(row_TK.shape[1]) < topk_length[:, None])
    assert torch.equal(is_live_TK, row_TK >= 0)
    row_TKL = torch.where(is_live_TK[..., None], pool_S1L[row_TK.clamp(min=0), 0], 0.0).float()
    score_THK = torch.einsum("thl,tkl->thk", q_THL.float(), row_TKL) * scale
    weight_THK = score_THK.masked_fill(~is_live_TK[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thk,tkc->thc", weight_THK, row_TKL[..., :C]).to(q_THL.dtype), None, None


def drawn(T: int, K: int, dtype: torch.dtype = torch.bfloat16, row_lanes: int = L) -> list:
    """T tokens of requests of LENGTHS tokens, lists with -1 anywhere; NaN in rows that are not written."""
    generator = torch.Generator().manual_seed(T * K)
    pages = -(-max(LENGTHS) // PAGE)
    table_BP = torch.randperm(len(LENGTHS) * pages, generator=generator).view(-1, pages).int()
    pool = torch.full((table_BP.numel(), PAGE, row_lanes), float("nan"), dtype=dtype, device=DEVICE)[..., :L]
    for request, length in enumerate(LENGTHS):
        for position in range(length):
            drawn_L = torch.randn(L, generator=generator).to(DEVICE, dtype)
            pool[table_BP[request, position // PAGE], position % PAGE] = drawn_L
    request_T = torch.arange(T).int() % len(LENGTHS)
    selected_TK = torch.full((T, K), -1, dtype=torch.int32)
    for token in range(1, T):
        order = torch.randperm(LENGTHS[request_T[token]], generator=generator)[:K].int()
        selected_TK[token, torch.randperm(K, generator=generator)[: len(order)]] = order
    # A padding row: its request means nothing.
    request_T[0] = 2**31 - 1
    q_THL = torch.randn(T, H, L, generator=generator).to(dtype)
    tensors = (q_THL, pool, selected_TK, table_BP, request_T)
    return [*(tensor.to(DEVICE) for tensor in tensors), 192**-0.5, C]


@pytest.mark.parametrize("row_lanes", [L, 640])
@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs the package itself")
def test_flash_mla_gets_what_it_documents(monkeypatch: pytest.MonkeyPatch, row_lanes: int) -> None:
    module(monkeypatch, "flash_mla", flash_mla_sparse_fwd=plain_sparse_fwd)
    monkeypatch.setattr(flash_mla, "sparse_attention_triton", None)
    monkeypatch.setattr(flash_mla, "is_faster", lambda T, H: True)
    arguments = drawn(6, 20, row_lanes=row_lanes)
    check_against_twin(poisoned(sparse_attention_package), sparse_attention_torch, *arguments)
    assert not sparse_attention_package(*arguments)[0].any()


def test_many_heads_of_tokens_go_through_it() -> None:
    """Measured: see the module."""
    assert [flash_mla.is_faster(T, 128) for T in (1, 39, 40, 4096)] == [False, False, True, True]
    assert not flash_mla.is_faster(40, 64)


def test_the_own_kernel_does_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "flash_mla_sparse", lambda *_: "package")
    monkeypatch.setattr(flash_mla, "pool_rows_triton", lambda *_: (None, None))
    monkeypatch.setattr(flash_mla, "sparse_attention_triton", lambda *_: "own")
    monkeypatch.setattr(flash_mla, "is_faster", lambda T, H: T >= 3)
    few, many = drawn(2, 5), drawn(3, 5)
    assert sparse_attention_package(*many) == "package"
    assert sparse_attention_package(*few) == "own"
    assert sparse_attention_package(*many, 2) == "own"
    assert sparse_attention_package(*drawn(3, 5, torch.float32)) == "own"
    q_THL, pool, *rest = many
    assert sparse_attention_package(q_THL[:, :63], pool, *rest) == "own"
    assert sparse_attention_package(q_THL, pool[:, :-1], *rest) == "own"
    assert sparse_attention_package(q_THL, drawn(3, 5, row_lanes=L + 3)[1], *rest) == "own"
    wide = drawn(3, 5, row_lanes=L + 8)[1]
    longer = wide.as_strided((*wide.shape[:2], L + 8), wide.stride())
    assert sparse_attention_package(q_THL, longer, *rest) == "own"
    # One element behind where a copy may begin.
    shifted = wide.as_strided(wide.shape, wide.stride(), 1)
    assert sparse_attention_package(q_THL, shifted, *rest) == "own"
    # Lanes that lie apart.
    apart = q_THL.repeat_interleave(2, -1)[..., ::2]
    assert sparse_attention_package(apart, pool, *rest) == "own"


def wide_latents() -> NoteConfig:
    """The tiny model with the heads and latent rows that FlashMLA takes in its full layers."""
    config = tiny()
    full = MlaGeometry(H, 32, C, 12, L - C, 10, 2.0e4, "headwise")
    return replace(config, text=replace(config.text, full=full, index_head_dim=70))


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs the package itself")
def test_the_engine_agrees_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step against the reference, probes and recordings among them, with all selected rows going through it."""
    calls = []

    def counted(q_THL: Tensor, *rest: object, **options: object) -> tuple[Tensor, None, None]:
        calls.append(len(q_THL))
        return plain_sparse_fwd(q_THL, *rest, **options)

    def choose(on: str, *_: object, packages: bool) -> device.Ops:
        assert packages
        packaged = device.Choice("sparse_attention", "package", "a stand-in")
        return device.Ops(device.choose(on, "torch").choices | {"sparse_attention": packaged})

    module(monkeypatch, "flash_mla", flash_mla_sparse_fwd=counted)
    monkeypatch.setattr(flash_mla, "is_faster", lambda T, H: True)
    monkeypatch.setattr(engine, "choose", choose)
    config = wide_latents()
    workload = Workload.parse("p:a20+b9 d:a+b m:a2 v:a3 t:a1 d:a+b")
    options = replace(OPTIONS, graphs=True)
    report = check_optimized(config, dict(synthetic_tensors(config)), [workload], ("bfloat16",), options=options)
    assert report.compared
    assert report.first_different is None, report.first_different.comparison.first
    assert calls


@settings(max_examples=12 if DEVICE == "cpu" else 3)
@given(st.integers(1, 6), st.sampled_from([1, 5, 127, 128, 129, 300]))
def test_rows_of_the_pool(T: int, K: int) -> None:
    _, _, selected_TK, table_BP, request_T, *_ = drawn(T, K)
    expected = pool_rows_torch(selected_TK, table_BP, request_T, PAGE)
    assert expected[0].shape == (T, -(-K // 128) * 128)
    for found, wanted in zip(poisoned(pool_rows_triton)(selected_TK, table_BP, request_T, PAGE), expected, strict=True):
        assert torch.equal(found, wanted)
    for token in range(T):
        for place, position in enumerate(selected_TK[token].tolist()):
            row = -1 if position < 0 else int(table_BP[request_T[token], position // PAGE]) * PAGE + position % PAGE
            assert expected[0][token, place] == row
        live = [place for place, position in enumerate(selected_TK[token].tolist()) if position >= 0]
        assert expected[1][token] == max([place + 1 for place in live], default=1)
