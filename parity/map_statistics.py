"""What a mapping leaves of sums and samples, where a dump has no more than those."""

from collections.abc import Sequence

from parity.manifest import DumpError
from parity.statistics import Sample, Statistics
from parity.transforms import Context, Deinterleaved, Rearrange, Scale, Transform


def mapped_statistics(parts: Sequence[Statistics], transforms: Sequence[Transform], context: Context) -> Statistics:
    """The statistics of the transformed sum of some tensors, from theirs.

    Raises: DumpError for a transform that needs the values.
    """
    known = _added(parts)
    for transform in transforms:
        known = _transformed(known, transform, context)
    return known


def _transformed(known: Statistics, transform: Transform, context: Context) -> Statistics:
    """What is left of the numbers. Where elements change places, the samples are lost and the sums are kept."""
    if isinstance(transform, Scale):
        factor = transform.factor(context)
        return Statistics(
            count=known.count,
            nan_count=known.nan_count,
            sum=_times(known.sum, factor),
            mean=_times(known.mean, factor),
            rms=_times(known.rms, abs(factor)),
            absmax=_times(known.absmax, abs(factor)),
            samples=tuple(Sample(index=sample.index, value=sample.value * factor) for sample in known.samples),
            resolution=known.resolution * abs(factor),
        )
    if isinstance(transform, Rearrange) and transform.keeps_order:
        return known
    if isinstance(transform, Rearrange | Deinterleaved):
        return known.model_copy(update={"samples": ()})
    raise DumpError(f"{transform.op}: cannot be done to sums and samples; dump the whole tensor")


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _added(parts: Sequence[Statistics]) -> Statistics:
    """Of a sum of tensors: sums, means and common samples add up; sizes do not."""
    if len(parts) == 1:
        return parts[0]
    sums, means = [part.sum for part in parts], [part.mean for part in parts]
    values = [{sample.index: sample.value for sample in part.samples} for part in parts]
    common = [index for index in values[0] if all(index in other for other in values)]
    return Statistics(
        count=parts[0].count,
        sum=None if None in sums else sum(value for value in sums if value is not None),
        mean=None if None in means else sum(value for value in means if value is not None),
        samples=tuple(Sample(index=index, value=sum(other[index] for other in values)) for index in common),
        resolution=sum(part.resolution for part in parts),
    )
