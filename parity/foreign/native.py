"""Our own folder format under foreign names: `manifest.json` says rows and positions, a mapping says the names."""

from pathlib import Path

from parity.foreign.dump import ForeignDump, ForeignStatistics, ForeignTensor, OwnRows
from parity.manifest import MANIFEST_FILE
from parity.trace_file import open_dump


def is_native(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def read_native(path: Path) -> ForeignDump:
    """Raises: DumpError."""
    dump = open_dump(path, any_names=True)
    tensors = [
        ForeignTensor(
            entry.name,
            entry.action,
            entry.shape,
            entry.torch_dtype,
            opened.source,
            rows=OwnRows(entry.request, entry.kind, entry.rows()),
        )
        for entry, opened in zip(dump.manifest.tensors, dump.entries, strict=True)
    ]
    statistics = [
        ForeignStatistics(
            entry.name,
            entry.action,
            entry.shape,
            entry.torch_dtype,
            entry.statistics,
            rows=OwnRows(entry.request, entry.kind, entry.rows()),
        )
        for entry in dump.statistics
    ]
    return ForeignDump(dump.trace.producer, "", tuple(tensors), tuple(statistics))
