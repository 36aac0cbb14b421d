"""Reports for a terminal: the one-line result first, then thin tables of at most 100 columns.

Plain text when stdout is not a terminal. Nothing is said by colour alone; every column names its unit. Only formats:
the numbers come ready in a record.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from parity.inspect_model import CachePlan, DtypeShare, Geometry, Inspection
    from reference.checkpoint.accounting import LayerClass

WIDTH = 100

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def terminal() -> Console:
    """A console on the current stdout, at most WIDTH columns wide."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


@contextmanager
def progress_lines() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is running now; nothing where stderr is not a terminal."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("") as status:
        yield lambda line: status.update(line[: console.width - 4])


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
        f"hidden size {inspection.hidden_size:,}, dense FFN {inspection.dense_intermediate_size:,}, "
        f"experts {inspection.moe_intermediate_size:,}, vocabulary {inspection.vocab_size:,}, "
        f"context up to {inspection.max_context_tokens:,} tokens"
    )
    if inspection.folder:
        console.print(
            f"verified: the headers of its weight files ({inspection.folder.weight_files}) hold exactly these tensors; "
            f"indexer RoPE layout: {inspection.folder.indexer_rope_layout}"
        )
    cache = inspection.cache
    sections = {
        f"Layers ({inspection.num_hidden_layers} in the backbone)": _layers(inspection),
        "Latent attention (sizes in values)": _geometries(inspection.geometries),
        "Parameters (active: without embedding tables and experts that are not chosen)": _parameters(inspection),
        "Tensors in the checkpoint": _tensors(inspection),
        f"Cache of one request ({cache.dtype}, {cache.draft_tokens_in_flight} draft tokens in flight; "
        f"beyond the window a token adds {cache.growth_bytes_per_token:,} B)": _cache(cache),
    }
    for title, table in sections.items():
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


def _table(text_columns: Sequence[str], number_columns: Sequence[str] = ()) -> Table:
    """Numbers stand right and are never cut; a column name may have two lines."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in text_columns:
        table.add_column(name)
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
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
    table = _table(("class", "layers", "attention", "feed-forward"), ("number", "tensors\neach", "bytes\neach"))

    def attention(layer_class: "LayerClass") -> str:
        if layer_class.kind.endswith("full"):
            return f"full, top {inspection.index_topk_keys:,}"
        return f"sliding, {inspection.sliding_window_tokens:,}"

    def feed_forward(layer_class: "LayerClass") -> str:
        if layer_class.kind.startswith("MoE"):
            shared = f" + {inspection.n_shared_experts}" if inspection.n_shared_experts else ""
            return f"{inspection.num_experts_per_tok} of {inspection.n_routed_experts}{shared} experts"
        return f"dense{', draft layer' if layer_class.kind == 'draft' else ''}"

    for layer_class in inspection.schedule:
        table.add_row(
            layer_class.letter,
            layer_ranges(layer_class.layers),
            attention(layer_class),
            feed_forward(layer_class),
            f"{len(layer_class.layers)}",
            f"{layer_class.tensors:,}",
            f"{layer_class.nbytes:,}",
        )
    return table


def _geometries(geometries: Sequence["Geometry"]) -> Table:
    table = _table(("", *(f"{_KINDS[geometry.layer_kind]} layers" for geometry in geometries)))
    for label, text_of in _GEOMETRY_ROWS:
        table.add_row(label, *(text_of(geometry) for geometry in geometries))
    return table


_GEOMETRY_ROWS: tuple[tuple[str, Callable[["Geometry"], str]], ...] = (
    ("heads", lambda g: f"{g.num_attention_heads}"),
    ("query latent, kv latent", lambda g: f"{g.q_lora_rank:,}, {g.kv_lora_rank:,}"),
    ("their scale after the norm", lambda g: f"{g.q_latent_scale:.6f}, {g.kv_latent_scale:.6f}"),
    ("query-key head", lambda g: f"{g.qk_head_dim} = {g.qk_nope_head_dim} nope + {g.qk_rope_head_dim} RoPE"),
    ("softmax scale, RoPE theta", lambda g: f"{g.softmax_scale:.8f}, {g.rope_theta:,.10g}"),
    ("value head, all heads", lambda g: f"{g.v_head_dim}, {g.attention_output_values:,}"),
    ("output gate", lambda g: f"{g.gate_type}, {g.gate_values:,}"),
    ("cached row", lambda g: f"{g.latent_row_values:,} = {g.kv_lora_rank:,} latent + {g.qk_rope_head_dim} RoPE"),
    ("indexer", lambda g: f"{g.index_heads} heads of {g.index_head_dim}" if g.index_heads else "none"),
    (
        "keys a query sees",
        lambda g: f"the {'best' if g.index_heads else 'last'} {g.visible_keys_at_most:,} up to itself",
    ),
)


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
    dtypes = [share.dtype for share in inspection.by_dtype]
    table = _table(
        ("part",), ("tensors", "bytes", *(f"{dtype}\n{unit}" for dtype in dtypes for unit in ("tensors", "bytes")))
    )

    def cells(by_dtype: Sequence["DtypeShare"]) -> list[str]:
        held = {share.dtype: (share.tensors, share.bytes) for share in by_dtype}
        return [f"{count:,}" for dtype in dtypes for count in held.get(dtype, (0, 0))]

    for part in inspection.parts:
        table.add_row(part.name, f"{part.tensors:,}", f"{part.bytes:,}", *cells(part.by_dtype))
    table.add_row("total", f"{inspection.total_tensors:,}", f"{inspection.total_bytes:,}", *cells(inspection.by_dtype))
    return table


def _cache(plan: "CachePlan") -> Table:
    table = _table(
        ("cached rows", "rows kept"),
        (
            "layers",
            "values\na row",
            "B a row,\nall layers",
            *(f"{total.context_tokens:,}\ntokens" for total in plan.totals),
        ),
    )
    for kind in plan.kinds:
        table.add_row(
            kind.name,
            "every" if kind.rows_at_most is None else f"at most {kind.rows_at_most:,}",
            f"{kind.layers}",
            f"{kind.row_values:,}",
            f"{kind.row_bytes_all_layers:,}",
            *(_size(use.bytes) for use in kind.uses),
        )
    table.add_row("total", "", "", "", "", *(_size(total.bytes) for total in plan.totals))
    return table
