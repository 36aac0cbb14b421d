"""Cases of people who use the harness, each with a port that makes one mistake, or none.

The numbers in the names are those of the list of cases. Ports are simulated by the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from parity.compare import compare, compare_exact
from parity.diagnose import Diagnosis, diagnose
from parity.faults.catalogue import CATALOGUE
from parity.faults.fault import Fault
from parity.findings import ChoiceResult, Comparison, ProbeResult
from parity.report.compare_text import where_lines
from parity.report.from_findings import report_of_diagnosis
from parity.run import traced
from parity.runners.reference import ReferenceRunner
from parity.trace import Trace
from parity.workload import Workload
from reference.checkpoint import synthetic_tensors
from reference.config import NoteConfig, slice_of, tiny
from reference.layers.indexer import select
from reference.probe import Override, Rows

BFLOAT16 = torch.bfloat16


class Port:
    """A config with synthetic weights, as the reference and with mistakes."""

    def __init__(self, config: NoteConfig, line: str, seed: int = 0, weights: dict[str, Tensor] | None = None):
        self.config, self.workload = config, Workload.parse(line, seed)
        self.weights = weights or dict(synthetic_tensors(config, seed))

    def reference(self, dtype: torch.dtype, faults: Sequence[Fault] = ()) -> ReferenceRunner:
        return ReferenceRunner(self.config, self.weights, dtype, faults=faults)

    def trace(self, *faults: Fault, dtype: torch.dtype = torch.float64) -> Trace:
        return traced(self.reference(dtype, faults), self.workload)

    def compared(self, trace: Trace) -> Comparison:
        return compare_exact(self.reference, trace, self.workload)

    def diagnosed(self, trace: Trace, faults: Sequence[Fault], dtype: torch.dtype = torch.float64) -> Diagnosis:
        draws = 0 if dtype == torch.float64 else 8
        return diagnose(self.reference, trace, dtype, self.workload, faults, draws=draws)


def one_layer(layer: int, **changes: object) -> NoteConfig:
    """A slice of tiny of one layer, without the draft layer."""
    sliced = slice_of(tiny(), [layer])
    return dataclasses.replace(
        sliced, text=dataclasses.replace(sliced.text, **({"num_nextn_predict_layers": 0} | changes))
    )


def only(trace: Trace, is_kept: Callable[[str], bool]) -> Trace:
    return Trace([entry for entry in trace.entries() if is_kept(entry.name)], trace.producer)


def of_names(comparison: Comparison) -> dict[str, ProbeResult]:
    return {result.name: result for result in comparison.probes}


@pytest.mark.parametrize("dtype", [torch.float64, BFLOAT16], ids=["exact", "bfloat16"])
def test_c02_a_missing_rescale_is_a_constant_factor(dtype: torch.dtype) -> None:
    """Ratios 5 and 10: the latents are smaller by their roots, which the finding says."""
    full = dataclasses.replace(tiny().text.full, q_lora_rank=20, kv_lora_rank=10)
    port = Port(one_layer(0, hidden_size=100, full=full, rms_norm_eps=1e-30), "p:a8")
    trace = port.trace(CATALOGUE["rescale_before_norm"], dtype=dtype)
    diagnosis = port.diagnosed(trace, list(CATALOGUE.values()), dtype)
    found = of_names(diagnosis.before)
    for name, ratio in (("q_latent", 5), ("kv_latent", 10)):
        factor = found[f"layers.0.attn.{name}"].factor
        assert factor == pytest.approx(ratio**-0.5, rel=1e-9 if dtype == torch.float64 else 1e-2)
    offered = {diagnosis.explanations[0].faults, *diagnosis.equivalents}
    assert offered >= {("rescale_before_norm",), ("rescale_flag_default_off",)}


def test_c02_what_is_no_multiple_has_no_factor() -> None:
    port = Port(one_layer(0), "p:a8")
    comparison = port.compared(port.trace(CATALOGUE["neox_rope"]))
    assert comparison.first is not None
    assert of_names(comparison)[comparison.first.name].factor is None


@pytest.mark.parametrize("layer", [0, 2], ids=["full", "sliding"])
def test_c03_a_scale_that_is_wrong_in_decode_only(layer: int) -> None:
    """Prefill agrees, the first decode differs at the attention core, and the scale is named with its ratio."""
    port, fault = Port(one_layer(layer), "p:a16 d:a d:a"), CATALOGUE["scale_from_latent_row_in_decode"]
    trace = port.trace(fault)
    comparison = port.compared(trace)
    assert comparison.first is not None
    assert comparison.first.name == "layers.0.attn.core"
    assert {result.first_bad.position for result in comparison.probes if result.first_bad} == {16}
    scales = [known for known in CATALOGUE.values() if "scale" in known.id]
    diagnosis = port.diagnosed(trace, scales)
    assert [hypothesis.faults for hypothesis in diagnosis.explanations] == [(fault.id,)]
    assert "scale" in fault.says


@pytest.mark.parametrize("dtype", [torch.float64, BFLOAT16], ids=["exact", "bfloat16"])
@pytest.mark.parametrize("layer", [0, 2], ids=["full", "sliding"])
def test_c03_the_ratio_of_the_scores_is_told(layer: int, dtype: torch.dtype) -> None:
    """The scores themselves are in no dump: the ratio is that under which the recorded core comes out."""
    port, fault = Port(one_layer(layer), "p:a16 d:a d:a"), CATALOGUE["scale_from_latent_row_in_decode"]
    diagnosis = port.diagnosed(port.trace(fault, dtype=dtype), [fault], dtype)
    first, geometry = diagnosis.before.first, port.config.text.geometry(0)
    assert isinstance(first, ProbeResult)
    ratio = (geometry.qk_head_dim / geometry.latent_row) ** 0.5
    assert first.score_factor == pytest.approx(ratio, rel=1e-9 if dtype == torch.float64 else 0.03)
    assert first.factor is None, "the core itself is no multiple"
    report = report_of_diagnosis(diagnosis, port.workload, "bfloat16", "golden", "dump", CATALOGUE)
    assert f"layers.0.attn.core is what attention scores times {first.score_factor:.4g} give" in "".join(
        where_lines(report)
    )


@pytest.mark.parametrize("fault_id", ["window_512", "no_window", "kv_b_row_order"])
def test_c03_what_is_no_multiple_of_the_scores_has_no_ratio(fault_id: str) -> None:
    port, fault = Port(one_layer(2), "p:a16 d:a d:a"), CATALOGUE[fault_id]
    first = port.diagnosed(port.trace(fault), [fault]).before.first
    assert isinstance(first, ProbeResult)
    assert (first.name, first.score_factor) == ("layers.0.attn.core", None)


@pytest.mark.parametrize(("length", "is_excluded"), [(3, False), (4, False), (5, True), (12, True)])
def test_c06_up_to_the_top_k_an_indexer_fault_is_not_excluded(length: int, is_excluded: bool) -> None:
    """Without the index probes: at T <= 4 outputs agree with the mistake, and the diagnosis says what that is worth."""
    port = Port(one_layer(0, index_topk=4), f"p:a{length}", seed=16)
    outputs = only(port.trace(CATALOGUE["indexer_rope_neox"]), lambda name: "index" not in name)
    diagnosis = port.diagnosed(outputs, [CATALOGUE["indexer_rope_neox"]])
    spots = [spot for spot in diagnosis.blind_spots if "indexer" in spot]
    if is_excluded:
        assert (diagnosis.verdict, spots) == ("explained", [])
    else:
        assert diagnosis.verdict == "agrees"
        assert "own tensors were not recorded" in spots[0]


def test_c06_with_the_index_probes_it_shows_at_once() -> None:
    port = Port(one_layer(0, index_topk=4), "p:a3")
    diagnosis = port.diagnosed(port.trace(CATALOGUE["indexer_rope_neox"]), [CATALOGUE["indexer_rope_neox"]])
    assert diagnosis.before.first is not None
    assert diagnosis.before.first.name == "layers.0.attn.index.query"
    assert not [spot for spot in diagnosis.blind_spots if "indexer" in spot]


def test_c06_every_kind_of_blind_spot_is_listed() -> None:
    port = Port(slice_of(tiny(), [0, 2]), "p:a5")
    spots = port.diagnosed(only(port.trace(), lambda name: name == "logits"), []).blind_spots
    for word in ("indexer", "window", "caches", "draft layer"):
        assert [spot for spot in spots if word in spot], (word, spots)


def test_c08_exact_ties_at_zero_are_chosen_alike_in_every_run() -> None:
    """Eight of ten keys score 0: the smaller positions win, 25 times."""
    scores_TS = torch.tensor([[3.0, 0, 0, 0, 0, 2.0, 0, 0, 0, 0]])
    chosen = {tuple(select(scores_TS, torch.ones_like(scores_TS, dtype=torch.bool), 4)[0].tolist()) for _ in range(25)}
    assert chosen == {(0, 1, 2, 5)}


def close_pair() -> Port:
    """256 experts, top 8; four equal tokens, so that each sees the same router input x.

    Every router row is a multiple of w, and w x is a little more than 1: seven experts have logit 2, expert 100 has 1,
    expert 200 has 1 and about 2^-10 more from one lane, all others -4. Both of the pair round to 1 in bfloat16.
    """
    config = one_layer(1, n_routed_experts=256, num_experts_per_tok=8)
    port = Port(config, "p:a4")
    port.workload = dataclasses.replace(port.workload, chosen={("a", position, 0): 5 for position in range(4)})
    x_D = port.trace().table("layers.0.ffn.input", "a").values[0]
    w_D = (1.004 * x_D / x_D.square().sum()).to(BFLOAT16)
    rows_ED = (-4.0 * w_D).repeat(256, 1)
    rows_ED[:7], rows_ED[100], rows_ED[200] = 2.0 * w_D, w_D, w_D
    steps_D = (torch.nextafter(w_D, w_D.sign() * torch.inf) - w_D).double() * x_D
    lane = int((steps_D - 2.0**-10).abs().argmin())
    rows_ED[200, lane] = torch.nextafter(w_D[lane], w_D[lane].sign() * torch.inf)
    port.weights["model.layers.0.mlp.gate.weight"] = rows_ED
    bias = port.weights["model.layers.0.mlp.gate.e_score_correction_bias"]
    port.weights["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.zeros_like(bias)
    return port


def test_c20_a_flip_names_the_experts_and_its_margin_in_steps_of_the_dtype() -> None:
    """A dump of what enters the router and of what it chooses."""
    port, router = close_pair(), ("layers.0.ffn.input", "layers.0.ffn.router.expert_ids")
    trace = only(port.trace(CATALOGUE["router_bf16"], dtype=BFLOAT16), lambda name: name in router)
    routers = [fault for fault in CATALOGUE.values() if "router" in fault.id]
    diagnosis = port.diagnosed(trace, routers, BFLOAT16)
    assert diagnosis.coverage == "some probes", "neither logits nor what leaves a layer was recorded"
    flips = [choice for choice in diagnosis.before.choices if choice.verdict == "flip"]
    assert [choice.exchange.position for choice in flips] == [0, 1, 2, 3]
    for choice in flips:
        exchange = choice.exchange
        assert (exchange.only_expected, exchange.only_actual) == ((200,), (100,))
        # The sigmoid has slope 0.197 at 1, where its value is 0.73: steps of bfloat16 are 2^-8 there.
        assert exchange.gap == pytest.approx(0.197 * 2.0**-10, rel=0.5)
        assert exchange.gap_in_ulps(BFLOAT16) < 1.0 < exchange.gap_in_ulps(torch.float32)
    assert ("router_bf16",) in [hypothesis.faults for hypothesis in diagnosis.explanations]


def test_c23_a_near_tie_is_replayed_and_the_fault_behind_it_is_found() -> None:
    """Layer 1 chooses another expert within the noise; layer 3 has a real fault. Layer 3 is to blame."""
    port = Port(tiny(), "p:a22", seed=1)
    truth, name = port.trace(), "layers.1.ffn.router.expert_ids"
    scores_TE = truth.table("layers.1.ffn.router.choice", "a").values
    best = scores_TE.topk(4)
    position = int((best.values[:, 2] - best.values[:, 3]).argmin())

    def swapped(value: Tensor, rows: Rows | None) -> Tensor:
        ids = value.clone()
        ids[position][ids[position] == best.indices[position, 2]] = best.indices[position, 3]
        return ids

    near_tie = Fault("near_tie", "", "V", (), "", "", listener=lambda config: Override(name, swapped))
    spoilt = Override("layers.3.attn.gate", lambda value, rows: value * 1.1)
    real = Fault("real", "", "V", (), "", "", listener=lambda config: spoilt)
    trace = port.trace(near_tie, real, dtype=BFLOAT16)
    comparison = compare(port.reference, trace, BFLOAT16, port.workload, views=("cascade", "isolated"))
    of_row = [choice for choice in comparison.choices if (choice.name, choice.exchange.position) == (name, position)]
    assert [choice.verdict for choice in of_row] == ["near tie"]
    assert isinstance(comparison.first, ProbeResult)
    assert comparison.first.name == "layers.3.attn.gate"


@pytest.mark.parametrize(
    ("fault_id", "first"),
    [("mtp_shares_embedding", "mtp.0.eh_input"), ("eh_concat_swapped", "mtp.0.fused")],
    ids=["C27", "C28"],
)
def test_c27_c28_c29_the_first_draft_tensor_that_differs(fault_id: str, first: str) -> None:
    """Teacher-forced drafts of depth 3: the text is right, and the first wrong draft tensor is found."""
    port = Port(tiny(), "p:a12 m:a3")
    comparison = port.compared(port.trace(CATALOGUE[fault_id]))
    assert comparison.first is not None
    assert comparison.first.name in (first, "mtp.0.eh_input")
    different = {result.name for result in comparison.probes if result.verdict == "different"}
    assert all(name.startswith("mtp.") for name in different), "the target verifies: its text is unaffected"
    assert {name.split(".")[1] for name in different} == {"0", "1", "2"}


def test_c70_a_factor_of_four_on_index_queries_shows_in_scores_only() -> None:
    port = Port(one_layer(0, index_topk=4), "p:a12")
    rows = {name: value * 4.0 for name, value in port.weights.items() if "indexer.wq_b" in name}
    assert rows
    scaled = Port(port.config, "p:a12", weights=port.weights | rows)
    right, trace = port.trace(), scaled.trace()
    for name in ("layers.0.attn.index.selected", "layers.0.output", "logits"):
        assert torch.equal(right.table(name, "a").values, trace.table(name, "a").values)
    found = of_names(port.compared(trace))
    assert found["layers.0.attn.index.scores"].factor == pytest.approx(4.0, rel=1e-12)


def test_c72_in_exact_mode_a_request_does_not_depend_on_its_company() -> None:
    alone = Port(tiny(), "p:a9 d:a d:a")
    for line in ("p:a9+b4 d:a+b d:a", "p:b6+a9+c3 d:a+c v:c3+a1"):
        together = Port(tiny(), line).trace()
        right = alone.trace()
        for name in ("layers.5.output", "logits"):
            torch.testing.assert_close(
                together.table(name, "a").values, right.table(name, "a").values, rtol=1e-12, atol=1e-12
            )


def test_c74_first_layer_tensor_step_and_position() -> None:
    """Six layers, a fault in layer 3 that starts with the second step: one finding has all that is asked."""

    def late(value: Tensor, rows: Rows | None) -> Tensor:
        return value * 1.5 if rows is not None and int(rows.positions[0]) >= 9 else value

    fault = Fault("late", "", "C", (), "", "", listener=lambda config: Override("layers.3.attn.core", late))
    port = Port(tiny(), "p:a9 p:a4 d:a")
    comparison = compare(
        port.reference, port.trace(fault, dtype=BFLOAT16), BFLOAT16, port.workload, views=("pinpoint",)
    )
    first = comparison.first
    assert isinstance(first, ProbeResult)
    assert not isinstance(first, ChoiceResult)
    assert (first.name, first.first_bad.position, first.factor) == (
        "layers.3.attn.core",
        9,
        pytest.approx(1.5, rel=1e-2),
    )
