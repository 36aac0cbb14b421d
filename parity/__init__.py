"""Proves that two implementations of Dots3 NOTE agree, and finds the first place where they do not.

`parity.testing` needs neither `reference` nor `optimized`; importing this package loads neither.
"""

DISTRIBUTION = "note-parity"
