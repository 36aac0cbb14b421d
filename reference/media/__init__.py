"""From files to model input: images, native video, sound.

Reading order: `image_size`, `image_config`, `image_decode`, `image_resample`, `image`; then `video_options`,
`video_budget`, `video_frames`, `video_sound`, `video_plan`, `video_decode`, `video`; `mel` for what is heard. Packages
that read file formats are imported where they are used: what can be computed without a decoder works without one.
"""
