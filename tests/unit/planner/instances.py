"""Random :class:`Tables` for the searches' tests: uneven costs, tight memory, current plans."""

from __future__ import annotations

import numpy as np

from megatron_flex.planner.native_search import shares
from megatron_flex.planner.tables import Arrivals, ElementKind, Tables, Tied, Wires


def random_tables(seed: int, max_elements: int = 10, max_devices: int = 6) -> Tables:
    """One instance. Bytes are whole numbers, so that no comparison hangs on rounding."""
    r = np.random.default_rng(seed)
    elements = int(r.integers(1, max_elements + 1))
    devices = int(r.integers(1, max_devices + 1))
    batches = int(r.integers(1, 13))
    spread = float(r.choice([0.0, 0.3, 0.8]))
    tokens = np.maximum(1, np.rint(200 * np.exp(spread * r.standard_normal(batches))))
    sharded = bool(r.integers(2))

    per_token = r.uniform(0.5, 2.0, elements) * r.choice([0.0, 1.0, 1.0, 3.0], elements)
    per_token[0] += 0.1  # not everything is free
    per_pair = r.uniform(0.0, 0.004, elements) * r.integers(0, 2, elements)
    squares = tokens**2 * r.uniform(0.3, 1.0, batches)
    forward = np.outer(tokens, per_token) + np.outer(squares, per_pair)
    backward = forward * r.uniform(1.5, 2.5, elements)
    work = forward + backward

    num_kinds = int(r.integers(1, elements + 1))
    kind = r.integers(0, num_kinds, elements)
    # Elements of a kind are alike in what memory optimisation sees.
    kinds = tuple(
        ElementKind(
            forward=float(r.uniform(10, 500)),
            activation=float(a := r.integers(0, 50)),
            kept=float(r.integers(0, a + 1)) if r.random() < 0.7 else None,
            optimizer=float(r.integers(0, 8000)),
        )
        for _ in range(num_kinds)
    )
    optimizer = np.array([kinds[k].optimizer for k in kind])
    state = r.integers(100, 20000, elements).astype(float)
    reduce = r.integers(0, 9000, elements).astype(float)
    update = r.uniform(0, 60, elements)
    tied = Tied()
    if elements > 1 and r.random() < 0.4:
        state_bytes, optimizer_bytes = r.integers(1, 5000, 2).tolist()
        tied = Tied(state_bytes, optimizer_bytes, float(r.uniform(0, 30)), 3000.0)
        for end in (0, elements - 1):
            state[end] += tied.state
            optimizer[end] += tied.optimizer
            update[end] += tied.update
            reduce[end] += tied.reduce

    per_server = int(r.integers(1, devices + 1))
    server = np.arange(devices) // per_server
    activation = np.array([kinds[k].activation for k in kind])
    whole = state.sum() + optimizer.sum() + activation.sum() * tokens.sum()
    loose = float(r.choice([0.1, 0.25, 0.5, 1.0, 3.0]))
    budget = np.rint(whole * loose * r.uniform(0.8, 1.2, devices))
    wires = Wires(
        per_byte=(0.001, 0.01),
        latency=(0.1, 1.0),
        hop=(float(r.uniform(0, 20)), float(r.uniform(20, 80))),
        busy=(float(r.uniform(0, 30)), float(r.uniform(30, 90))),
        host_per_byte=float(r.choice([0.002, 0.02])),
    )
    arrivals = None
    if r.random() < 0.6:
        classes = int(r.integers(1, devices + 1))
        size = r.integers(0, 9000, (classes, elements)) * r.integers(0, 2, (classes, elements))
        early = size * r.uniform(0.001, 0.02, (classes, elements))
        arrivals = Arrivals(
            device_class=r.integers(0, classes, devices),
            size=size.astype(float),
            early=early,
            handover=early * r.uniform(1.0, 3.0, (classes, elements)),
            spare=r.integers(0, 20000, classes).astype(float),
            hide=float(r.uniform(0, 200)),
        )
    return Tables(
        points=tuple(range(elements + 1)),
        work=work.sum(0),
        forward=forward.sum(0),
        first_forward=forward.min(0),
        first_backward=backward.min(0),
        reduce=reduce,
        largest_reduce=np.ceil(reduce * r.uniform(0.5, 1.0, elements)),
        state=state,
        optimizer=optimizer,
        transient=r.integers(0, 3, elements).astype(float),
        update=update,
        kind=kind,
        kinds=kinds,
        tied=tied,
        num_micro_batches=batches,
        max_tokens=float(tokens.max()),
        total_tokens=float(tokens.sum()),
        chain=float(work.sum(1).max()),
        shares=shares(work.sum(1), tokens, devices),
        server=server,
        budget=budget,
        buffers=float(r.integers(0, 1000)),
        wires=wires,
        arrivals=arrivals,
        split=bool(r.integers(2)),
        sharded=sharded,
        offload_optimizer=bool(r.integers(2)),
        offload_activations=bool(r.integers(2)),
    )
