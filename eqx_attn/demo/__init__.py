"""A small language model trained with `eqx_attn`: `python -m eqx_attn.demo`."""
