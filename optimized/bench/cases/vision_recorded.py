"""The vision tower's calls that come again, recorded and replayed, beside the same calls issued launch by launch.

Only of one image or a few frames: in longer calls the host is ahead of the device anyway. Besides the check of all
towers, the rows of the replay must be those of the call that it recorded, within a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from optimized.bench.case import Case, Inputs, Peer, Problem
from optimized.bench.cases.vision import VisionShape, judged, vision_cases, vision_inputs, vision_shapes
from optimized.bench.judge import Triple
from optimized.bench.peers_vision import FLIPPED_LIMIT, VisionCall
from optimized.vision_graphs import RecordedVision
from reference.config import VisionConfig

# N patches  M output rows  X values of a patch  O output width

PEER = "the same, not recorded"


def recorded_vision_cases(vision: VisionConfig, shapes: Sequence[VisionShape] | None = None) -> Iterator[Case]:
    shapes = shapes or [shape for shape in vision_shapes(vision) if shape.has_peers]
    for shape, case in zip(shapes, vision_cases(vision, shapes), strict=True):
        op, build = f"{case.op}.recorded", _recorded(vision, shape)
        yield Case(op, case.shape, case.tokens, case.work, case.timing, build, case.uses)


def _recorded(vision: VisionConfig, shape: VisionShape) -> Callable[[Inputs], Problem]:
    def build(given: Inputs) -> Problem:
        drawn, tower, timed, few = vision_inputs(vision, shape, given)
        recorded = RecordedVision(tower, timed.grids)

        def issued(call: VisionCall) -> Tensor:
            return tower(call.pixels_NX, call.grids)

        def check(out_MO: Tensor) -> list[Triple]:
            few_MO, same_MO = RecordedVision(tower, few.grids)(few.pixels_NX), issued(timed)
            return [judged(drawn, few, few_MO), Triple(out_MO, same_MO, same_MO.double())]

        peer = Peer(PEER, lambda: issued(timed), lambda _: issued(few), FLIPPED_LIMIT)
        return Problem(lambda: recorded(timed.pixels_NX), check, [peer])

    return build
