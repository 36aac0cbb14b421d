"""All faults of the preprocessing: patches of `reference.media`, each with the value at which it first shows.

They change no weight and no layer, so they are not verified by a sweep of the model: what they are applied to is a set
of files. `first` names a value of the preprocessing (`image.size`, `video.indices`, ...), not a probe.
"""

from parity.faults.fault import Fault
from parity.faults.media_image import IMAGE_FAULTS
from parity.faults.media_video import VIDEO_FAULTS

MEDIA_FAULTS: tuple[Fault, ...] = IMAGE_FAULTS + VIDEO_FAULTS
