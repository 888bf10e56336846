"""Writes attention kernels from templates: a specification in, the text of one kernel out."""
