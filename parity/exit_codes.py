"""What the command returns to the shell."""

EXIT_AGREES = 0
EXIT_DISAGREES = 1
# Wrong use, unreadable input, nothing compared, or a bug.
EXIT_UNUSABLE = 2
# No GPU, a missing extra.
EXIT_COULD_NOT_RUN = 3
