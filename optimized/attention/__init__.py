"""Attention cores: absorbed decode over ring and pages, expanded prefill, index scores and the selection of keys."""
