#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times JAX on the CPU, jitted, case by case on request: bench_server.py says how to talk to it.

Cases, as in torch_bench.py:
  mlp/DTYPE/OPTIMIZER/bBATCH     one jitted training step of 784-512-512-10 with donated state, f32, or bf16: weights in f32, cast for
                                 the products; logits and loss in f32. OPTIMIZER sgd (lr 0.01) or adam (lr 1e-3)
  matmul/MxKxN/DTYPE             jitted a @ b, f32, bf16 and f16
  add/16/plain                   jitted add of 16 floats
  linear/1x16x16/plain           jitted x @ w.T + b of batch 1, 16 to 16
Each call waits for its result. XLA takes one thread for each CPU that the process may use, so --threads N keeps it to N CPUs.
"""
import functools
import os
import sys

from bench_server import Server, arguments

options = arguments()
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
except ImportError as failure:
    sys.exit(f"jax_bench: {failure}")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def mlp(dtype, kind, batch):
    low = DTYPES[dtype]
    keys = jax.random.split(jax.random.key(1), 5)
    sizes = ((784, 512), (512, 512), (512, 10))
    params = [(jax.random.normal(key, size) * size[0] ** -0.5, jnp.zeros(size[1])) for key, size in zip(keys, sizes)]
    x = jax.random.normal(keys[3], (batch, 784))
    y = jax.random.randint(keys[4], (batch,), 0, 10)
    moments = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)] if kind == "adam" else []

    def loss_of(p, a, b):
        h = a.astype(low)
        for index, (w, bias) in enumerate(p):
            h = h @ w.astype(low) + bias.astype(low)
            if index < 2:
                h = jax.nn.relu(h)
        return -jnp.take_along_axis(jax.nn.log_softmax(h.astype(jnp.float32)), b[:, None], 1).mean()

    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(state, a, b):
        p, m, count = state
        loss, g = jax.value_and_grad(loss_of)(p, a, b)
        count = count + 1
        if kind == "sgd":
            p = jax.tree.map(lambda w, d: w - 0.01 * d, p, g)
        else:
            first = jax.tree.map(lambda u, d: 0.9 * u + 0.1 * d, m[0], g)
            second = jax.tree.map(lambda u, d: 0.999 * u + 0.001 * d * d, m[1], g)
            one, two = 1 - 0.9**count, 1 - 0.999**count
            p = jax.tree.map(lambda w, u, s: w - 1e-3 * (u / one) / (jnp.sqrt(s / two) + 1e-8), p, first, second)
            m = [first, second]
        return (p, m, count), loss

    state = (params, moments, jnp.float32(0))

    def call():
        nonlocal state
        state, loss = step(state, x, y)
        loss.block_until_ready()
        state[0][0][0].block_until_ready()

    return call


def matmul(m, k, n, dtype):
    keys = jax.random.split(jax.random.key(1))
    a = jax.random.normal(keys[0], (m, k)).astype(DTYPES[dtype])
    b = jax.random.normal(keys[1], (k, n)).astype(DTYPES[dtype])
    product = jax.jit(jnp.matmul)
    return lambda: product(a, b).block_until_ready()


def add():
    a, b = jnp.ones(16), jnp.ones(16)
    function = jax.jit(jnp.add)
    return lambda: function(a, b).block_until_ready()


def linear():
    x, w, b = jnp.ones((1, 16)), jnp.ones((16, 16)), jnp.ones(16)
    function = jax.jit(lambda a, m, c: a @ m.T + c)
    return lambda: function(x, w, b).block_until_ready()


def cases():
    bind = functools.partial
    table = {"add/16/plain": add, "linear/1x16x16/plain": linear}
    for dtype in ("f32", "bf16"):
        for kind in ("sgd", "adam"):
            for batch in (64, 1):
                table[f"mlp/{dtype}/{kind}/b{batch}"] = bind(mlp, dtype, kind, batch)
    for m, k, n in ((64, 784, 512), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)):
        for dtype in DTYPES:
            table[f"matmul/{m}x{k}x{n}/{dtype}"] = bind(matmul, m, k, n, dtype)
    return table


if __name__ == "__main__":
    Server("jax", jax.__version__, options.threads, cases()).serve()
