"""Bicubic resampling to 8 bits, as the definition, in integers: the same bits as Pillow's `resize(BICUBIC)`.

Along one axis of n pixels that becomes m, with s = n / m and f = max(1, s) (the filter widens when an image shrinks,
which keeps it from aliasing), output pixel o is centred at c = (o + 1/2) s and reads the input pixels

    i from trunc(c - 2f + 1/2) to trunc(c + 2f + 1/2) - 1, inside the image, with weight K((i - c + 1/2) / f)

K is Keys' cubic with a = -1/2. The weights of a pixel are normalised to sum 1 and rounded to 22-bit fixed point, halves
away from zero; the sum is rounded to the nearest integer and clamped to 0..255. First along x, *into 8 bits*, then
along y. An axis whose size does not change is not touched.

`image` calls Pillow; this file says what Pillow computes, and is where one mistaken resize is told from another.
Source: image_video specification, section 2.3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# H, W sides  C channels  O output pixels  I input pixels
FIXED_POINT_BITS = 22


def keys_cubic(a: float) -> Callable[[float], float]:
    """Keys' piecewise cubic: interpolating, zero from distance 2 on."""

    def kernel(x: float) -> float:
        x = abs(x)
        if x < 1:
            return ((a + 2) * x - (a + 3)) * x * x + 1
        return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0

    return kernel


BICUBIC = keys_cubic(-0.5)


def triangle(x: float) -> float:
    """Bilinear interpolation's kernel: zero from distance 1 on."""
    return max(0.0, 1.0 - abs(x))


@dataclass(frozen=True)
class Resampler:
    """A separable filter.

    `is_antialiased`: it widens when an image shrinks. `is_fixed_point`: integer weights, and 8 bits between the axes.
    """

    kernel: Callable[[float], float] = BICUBIC
    reach: float = 2.0
    is_antialiased: bool = True
    is_fixed_point: bool = True

    def __call__(self, image_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
        """uint8 [h, w, C] to uint8 [height, width, C]."""
        along_x_HWC = image_HWC if image_HWC.shape[1] == width else self._along_rows(image_HWC, width)
        if image_HWC.shape[0] == height:
            return _to_8_bits(along_x_HWC)
        along_y_WHC = self._along_rows(along_x_HWC.transpose(1, 0, 2), height)
        return _to_8_bits(along_y_WHC.transpose(1, 0, 2))

    def weights(self, size: int, new_size: int) -> np.ndarray:
        """weights_OI float64 [new_size, size]; each row sums to 1."""
        scale = size / new_size
        widening = max(1.0, scale) if self.is_antialiased else 1.0
        weights_OI = np.zeros((new_size, size))
        for o in range(new_size):
            centre = (o + 0.5) * scale
            first = max(0, math.trunc(centre - self.reach * widening + 0.5))
            last = min(size, math.trunc(centre + self.reach * widening + 0.5))
            row = np.array([self.kernel((i - centre + 0.5) / widening) for i in range(first, last)])
            weights_OI[o, first:last] = row / row.sum()
        return weights_OI

    def _along_rows(self, image_HWC: np.ndarray, width: int) -> np.ndarray:
        weights_OI = self.weights(image_HWC.shape[1], width)
        if self.is_fixed_point:
            scaled_OI = weights_OI * (1 << FIXED_POINT_BITS)
            weights_OI = np.trunc(scaled_OI + np.copysign(0.5, scaled_OI))
        # Integer products below 2^31 add up exactly in float64.
        sums_HOC = np.tensordot(image_HWC.astype(np.float64), weights_OI, axes=(1, 1)).transpose(0, 2, 1)
        if not self.is_fixed_point:
            return sums_HOC
        return _to_8_bits(np.floor((sums_HOC + (1 << (FIXED_POINT_BITS - 1))) / (1 << FIXED_POINT_BITS)))


def _to_8_bits(image_HWC: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(image_HWC), 0, 255).astype(np.uint8)
