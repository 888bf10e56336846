"""What all tests share: the environment that jax and libtpu read when imported, strict promotion, keys, and caches."""

import hashlib
import os

# Before jax is imported. A run on a GPU sets JAX_PLATFORMS itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu compiles here without a TPU: do not look for one, and let each of pytest-xdist's workers load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Programs of tests are small and run once or twice: compiling them is what takes the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# NumPy's threads wait for work in a loop, which costs the other worker more than they win with arrays this small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects that live on: looking through them at every 2,000th new one finds little.
gc.set_threshold(50_000, 20, 50)

# The first call of an example compiles, so no deadline. Derandomized: a failure is there for everyone, each time.
hypothesis.settings.register_profile("eqx_attn", deadline=None, derandomize=True, database=None, print_blob=False)
hypothesis.settings.load_profile("eqx_attn")


@pytest.fixture
def random_key(request):
    """A key of the test's own: the same on every run, another for each test and each of its parameters."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    return jax.random.key(int.from_bytes(digest[:4], "little"))


@pytest.fixture(scope="session", autouse=True)
def _cache_dir(tmp_path_factory):
    """Kernels rendered or compiled by tests stay out of the user's cache, and the user's cache out of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQX_ATTN_CACHE_DIR", str(tmp_path_factory.mktemp("eqx_attn_cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _clear_compiled():
    """Compiled functions are rarely shared between modules, and kept for the whole session they fill the memory."""
    yield
    jax.clear_caches()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU (run with JAX_PLATFORMS=cuda)")
