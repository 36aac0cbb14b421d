"""GELU inside a kernel, with one exponential and a polynomial.

gelu(x) = x Φ(x) = max(x, 0) - |x| / 2 · erfc(|x| / √2),    erfc(t / √2) = 2^(-t p(t))

p is smooth and nearly linear. Its coefficients are a least-squares fit in float64, weighted again until the largest
error of gelu, 9e-9, is the same everywhere; in float32 the rounding of the rest is 2.5e-7, a quarter of what x / 2 ·
(1 + erf(x / √2)) has, which takes the difference of two numbers near 1 on the negative side. And it is the exact GELU,
not the one with tanh, which is 5e-4 off. Source: audio specification, section 6.
"""

from optimized.kernels.common import tl, triton


@triton.jit
def gelu(x):
    """float32 to float32. Infinities give NaN: 0 times an infinity."""
    t = tl.abs(x)
    p = 1.902058289e-06 * t - 2.805684328e-05
    p = p * t + 1.314727071e-04
    p = p * t + 2.720771392e-04
    p = p * t - 7.245423331e-03
    p = p * t + 5.262761252e-02
    p = p * t + 4.591621425e-01
    p = p * t + 1.151111046e00
    return tl.maximum(x, 0.0) - 0.5 * t * tl.exp2(-t * p)
