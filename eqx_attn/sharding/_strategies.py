"""The strategies by name. Each is a module of `forward`, `backward` and `SHARDED`, for one device inside a `shard_map`."""

from . import _all_gather, _all_to_all, _ring

STRATEGIES = dict(ring=_ring, all_gather=_all_gather, all_to_all=_all_to_all)
