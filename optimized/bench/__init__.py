"""The benchmark: every op and whole steps at released geometry, beside what the machine allows and what others reach.

floors      what an op must at least read and compute, and how long that takes at measured ceilings
case, cases one row each: inputs, the op, its twin, its peers
run         checks a case, then times it; a case whose check is red has no time
layer_run   one decoder layer over one step, for the rows of single layers
slices      whole steps of a four-layer slice
generation  text from prompts to the last token, with drafts and without
"""
