"""Dots3 NOTE as production code: the text model, its draft layer and the towers over ragged batches.

Read in this order:

device     which backend each op takes, and why         kernels/, attention/   the ops, each beside its torch twin
weights    the state dict in packed storage             cache                  pages, rings, who owns what
planning   a ragged step from lengths alone             step                   its metadata, and the one upload
text, mtp  the layers over one step                     runner, graphs         one step, launched or recorded
draws      how the next token is chosen on the device   drafting               the draft layer driven behind a step
items      what is asked for, what is refused           draft_rounds           verified drafts, and which are kept
engine     many requests: steps, decoding, drafts
vision     the towers over many images and frames,      audio                  and over many clips
model      requests that begin with media              given_rows             embeddings in the place of ids
bench/     every op and whole steps beside floors and peers
"""

import reference

DISTRIBUTION = "note-parity"


class ShadowedPackageError(ImportError):
    """`reference` was imported from somewhere else than this distribution.

    It cannot be a class of `reference.errors`, which is what is missing then, nor of `parity`, which stands above.
    """


if getattr(reference, "DISTRIBUTION", None) != DISTRIBUTION:
    raise ShadowedPackageError(
        f"package 'reference' was imported from {reference.__file__ or list(reference.__path__)}, which is not part of "
        f"{DISTRIBUTION}: a folder or file of that name shadows it; run from another directory or rename it"
    )
