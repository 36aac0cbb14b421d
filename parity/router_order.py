"""Router weights come in the order of their experts' ids, which is any order. Here they get one to be compared in."""

from __future__ import annotations

from parity.trace import Table, Trace


def ids_of_weights(name: str) -> str:
    """The name of the expert ids to which router weights belong."""
    return name.removesuffix("weights") + "expert_ids"


def in_order_of_ids(name: str, request: str, trace: Trace) -> Table:
    """The table of a name; router weights in the order of ascending expert ids, if the trace has them."""
    table = trace.table(name, request)
    if not name.endswith("router.weights") or not trace.has(ids_of_weights(name), request):
        return table
    order = trace.table(ids_of_weights(name), request).values.argsort(dim=-1)
    return Table(table.keys, table.values.gather(-1, order.to(table.values.device)))
