"""Reports for a terminal: the one-line result first, then thin tables of at most 100 columns.

Plain text when stdout is not a terminal. Nothing is said by colour alone; every column names its unit. Only formats:
the numbers come ready in a record.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from parity.inspect_model import CacheKind, Geometry, Inspection, Part
    from reference.checkpoint.accounting import LayerClass

WIDTH = 100

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def terminal() -> Console:
    """A console on the current stdout, at most WIDTH columns wide."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


def print_json(record: Any) -> None:
    """One frozen record as one JSON object on stdout; its field names carry the units."""
    print(json.dumps(dataclasses.asdict(record), indent=2))


def print_inspection(inspection: "Inspection") -> None:
    """At most a screen: summary, layers, geometries, parameters, tensors, cache."""
    console = terminal()
    console.print(
        f"{inspection.name}: {_billions(inspection.total_parameters)} parameters, "
        f"{_billions(inspection.active_parameters_per_token)} active a token, "
        f"{inspection.total_bytes:,} bytes in {inspection.total_tensors:,} tensors"
    )
    console.print(
        f"{inspection.num_hidden_layers} layers, hidden size {inspection.hidden_size:,}, "
        f"vocabulary {inspection.vocab_size:,}, context up to {inspection.max_context_tokens:,} tokens"
    )
    if inspection.folder:
        console.print(
            f"verified: {inspection.folder.weight_files} weight files hold exactly these tensors (headers read); "
            f"indexer RoPE layout: {inspection.folder.indexer_rope_layout}"
        )
    for title, table in (
        ("Layers", _layers(inspection)),
        ("Latent attention (sizes in values)", _geometries(inspection.geometries)),
        (
            "Parameters (active: read for one token; embedding tables and unchosen experts are not)",
            _parameters(inspection),
        ),
        ("Tensors in the checkpoint", _tensors(inspection)),
        (
            f"Cache of one request ({inspection.cache.dtype}, {inspection.cache.draft_tokens_in_flight} draft tokens in "
            f"flight; grows by {inspection.cache.growth_bytes_per_token:,} B a token)",
            _cache(inspection),
        ),
    ):
        console.print(f"\n{title}", style="bold")
        console.print(table)


def layer_ranges(layers: Sequence[int]) -> str:
    """Sorted layer numbers in short, losing none: `2-4 to 42-44 by 4` stands for 2-4, 6-8, ..., 42-44."""
    runs: list[tuple[int, int]] = []  # first layer, number of layers
    for layer in layers:
        if runs and layer == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    texts: list[str] = []
    while runs:
        regular = _regular_runs(runs)
        if regular > 2:
            texts.append(f"{_run(runs[0])} to {_run(runs[regular - 1])} by {runs[1][0] - runs[0][0]}")
        else:
            regular = 1
            texts.append(_run(runs[0]))
        del runs[:regular]
    return ", ".join(texts)


def _regular_runs(runs: Sequence[tuple[int, int]]) -> int:
    """How many of the first runs are equally long and equally far apart."""
    count = 1
    while count < len(runs) and (
        runs[count][1] == runs[0][1] and runs[count][0] - runs[count - 1][0] == runs[1][0] - runs[0][0]
    ):
        count += 1
    return count


def _run(run: tuple[int, int]) -> str:
    first, count = run
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


def _table(text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in text_columns:
        table.add_column(name)
    for name in number_columns:
        table.add_column(name, justify="right")
    return table


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count:,}"


def _size(count: int) -> str:
    """Bytes in the largest binary unit, three digits."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return (
        f"{count} B" if unit == 0 else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {_BYTE_UNITS[unit]}"
    )


def _layers(inspection: "Inspection") -> Table:
    table = _table(
        ("class", "layers", "attention", "feed-forward"), ("layers in all", "tensors a layer", "bytes a layer")
    )

    def attention(layer_class: "LayerClass") -> str:
        if layer_class.kind.endswith("full"):
            return f"full, top {inspection.index_topk_keys:,} keys"
        return f"sliding, window {inspection.sliding_window_tokens:,}"

    def feed_forward(layer_class: "LayerClass") -> str:
        if not layer_class.kind.startswith("MoE"):
            return f"dense {inspection.dense_intermediate_size:,}"
        return (
            f"{inspection.num_experts_per_tok} of {inspection.n_routed_experts} + {inspection.n_shared_experts} "
            f"experts of {inspection.moe_intermediate_size:,}"
        )

    for layer_class in inspection.schedule:
        table.add_row(
            layer_class.letter,
            layer_ranges(layer_class.layers) + (" (draft)" if layer_class.kind == "draft" else ""),
            attention(layer_class),
            feed_forward(layer_class),
            f"{len(layer_class.layers)}",
            f"{layer_class.tensors:,}",
            f"{layer_class.nbytes:,}",
        )
    return table


def _geometries(geometries: Sequence["Geometry"]) -> Table:
    table = _table(("", *(f"{_KINDS[geometry.layer_kind]} layers" for geometry in geometries)), ())
    for label, text_of in (
        ("heads", lambda g: f"{g.num_attention_heads}"),
        ("query and kv latent", lambda g: f"{g.q_lora_rank:,} and {g.kv_lora_rank:,}"),
        ("rescaled after the norm by", lambda g: f"{g.q_latent_scale:.6f} and {g.kv_latent_scale:.6f}"),
        ("query-key head", lambda g: f"{g.qk_head_dim} = {g.qk_nope_head_dim} nope + {g.qk_rope_head_dim} RoPE"),
        ("value head, all heads", lambda g: f"{g.v_head_dim}, {g.attention_output_values:,}"),
        ("softmax scale, RoPE theta", lambda g: f"{g.softmax_scale:.8f}, {g.rope_theta:.3g}"),
        ("output gate", lambda g: f"{g.gate_type}, {g.gate_values:,}"),
        ("cached row", lambda g: f"{g.latent_row_values:,} = {g.kv_lora_rank:,} latent + {g.qk_rope_head_dim} RoPE"),
        ("indexer", lambda g: f"{g.index_heads} heads of {g.index_head_dim}" if g.index_heads else "none"),
        ("keys a query sees", lambda g: f"at most {g.visible_keys_at_most:,}, {_visible(g)}"),
    ):
        table.add_row(label, *(text_of(geometry) for geometry in geometries))
    return table


def _visible(geometry: "Geometry") -> str:
    return "the best of all" if geometry.index_heads else "itself and the ones before it"


def _parameters(inspection: "Inspection") -> Table:
    table = _table(("part",), ("parameters", "router bias values", "active parameters"))
    for part in inspection.parts:
        table.add_row(
            part.name,
            f"{part.parameters:,}",
            f"{part.router_bias_values:,}",
            f"{part.active_parameters:,} a {part.active_per}",
        )
    return table


def _tensors(inspection: "Inspection") -> Table:
    dtypes = sorted({share.dtype for part in inspection.parts for share in part.by_dtype})
    table = _table(
        ("part",), ("tensors", "bytes", *(f"{dtype} {unit}" for dtype in dtypes for unit in ("tensors", "bytes")))
    )

    def cells(part: "Part") -> list[str]:
        shares = {share.dtype: share for share in part.by_dtype}
        return [
            f"{getattr(shares[dtype], unit):,}" if dtype in shares else "0"
            for dtype in dtypes
            for unit in ("tensors", "bytes")
        ]

    for part in inspection.parts:
        table.add_row(part.name, f"{part.tensors:,}", f"{part.bytes:,}", *cells(part))
    table.add_row("total", f"{inspection.total_tensors:,}", f"{inspection.total_bytes:,}")
    return table


def _cache(inspection: "Inspection") -> Table:
    plan = inspection.cache
    table = _table(
        ("rows",),
        ("layers", "B a row, all layers", "rows kept", *(f"{t.context_tokens:,} tokens" for t in plan.totals)),
    )

    def kept(kind: "CacheKind") -> str:
        return "every" if kind.rows_at_most is None else f"at most {kind.rows_at_most:,}"

    for kind in plan.kinds:
        table.add_row(
            f"{kind.name}, {kind.row_values:,} values",
            f"{kind.layers}",
            f"{kind.row_bytes_all_layers:,}",
            kept(kind),
            *(_size(use.bytes) for use in kind.uses),
        )
    table.add_row("total", "", "", "", *(_size(total.bytes) for total in plan.totals))
    return table
