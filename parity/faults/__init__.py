"""Known porting mistakes, each a small patch of the reference.

Reading order: `fault`, one section file, `catalogue`, `verify`.
"""
