"""Timing and verification on the present device: `python -m eqx_attn.bench --help`."""
