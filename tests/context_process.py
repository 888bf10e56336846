"""One of two processes of test_context_processes: the gradients of a ring over the devices of both, to a file."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqx_attn


def gradients(context, arrays):
    """Of query, key and value."""

    def loss(*x):
        return jnp.sum(jnp.sin(eqx_attn.attention(*x, mask="causal", context=context, implementation="xla")))

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


def inputs():
    generator = np.random.default_rng(0)
    return [generator.normal(size=(1, 16, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]


if __name__ == "__main__":
    address, number, path = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(number))
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    assert jax.process_count() == 2 and len(mesh.local_devices) == 2
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    arrays = [jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for x in inputs()]
    with jax.set_mesh(mesh):
        found = gradients(eqx_attn.ContextParallel("context"), arrays)
    found = [multihost_utils.process_allgather(x, tiled=True) for x in found]
    if number == "0":
        np.savez(path, *found)
