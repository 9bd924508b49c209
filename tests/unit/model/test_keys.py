"""The hash behind dropout: the same bits everywhere, and bits that look random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model import keys

WORD = (1 << 64) - 1


def keeps(token: int, site: int, channel: int, probability: float) -> bool:
    """The definition in plain integers, element by element."""
    z = keys.mix((token & WORD) ^ site)
    low, high = z & 0xFFFFFFFF, z >> 32
    x = (channel * 0x9E3779B1 + low) & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15) ^ high) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16) >= keys.threshold(probability)


@given(
    token=st.integers(-(1 << 63), (1 << 63) - 1),
    site=st.integers(0, 1000),
    head=st.integers(0, 100),
    channel=st.integers(0, 70000),
    probability=st.floats(0.01, 0.99),
)
def test_the_mask_in_torch_operations_equals_its_definition(
    token: int, site: int, head: int, channel: int, probability: float
) -> None:
    key = keys.site_key(site, head)
    mask = keys.keep_mask(torch.tensor([token]), key, torch.tensor([channel]), probability)
    assert mask.item() == keeps(token, key, channel, probability)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 50), min_size=8, max_size=8),
)
def test_positions_count_from_the_start_of_each_slice(
    lengths: list[int], starts: list[int]
) -> None:
    expected = [s + i for s, n in zip(starts, lengths, strict=False) for i in range(n)]
    found = keys.packed_positions(starts[: len(lengths)], lengths)
    assert list(map(int, found)) == expected


def test_tokens_of_a_run_have_different_keys() -> None:
    tokens = keys.token_keys(1, range(200), [0] * 200, [500] * 200)
    assert len(np.unique(tokens.numpy())) == 100_000
    other = keys.token_keys(2, range(200), [0] * 200, [500] * 200)
    assert not np.isin(tokens.numpy(), other.numpy()).any()


def test_sites_of_a_deep_model_have_different_keys() -> None:
    sites = [keys.EMBEDDING_SITE]
    for layer in range(200):
        sites += [
            keys.attention_site(layer),
            keys.hidden_site(layer, mlp=False),
            keys.hidden_site(layer, mlp=True),
        ]
    assert len(set(sites)) == 601
    assert len({keys.site_key(s, h) for s in sites for h in range(64)}) == 601 * 64


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_masks_look_random_in_every_direction(probability: float) -> None:
    """Rates of elements and of neighbouring pairs lie within five standard deviations."""
    tokens = keys.token_keys(5, range(20), [0] * 20, [50] * 20)
    channels = torch.arange(512, dtype=torch.int32)

    def drops(site: int) -> torch.Tensor:
        return ~keys.keep_mask(tokens, keys.site_key(site), channels, probability)

    first, second = drops(2), drops(3)
    pairs = {
        "elements": first,
        "channels": first[:, 1:] & first[:, :-1],
        "positions": first[1:] & first[:-1],
        "samples": first[50:] & first[:-50],
        "sites": first & second,
        "even and odd channels": first[:, ::2] & first[:, 1::2],
    }
    for name, dropped in pairs.items():
        rate = probability if name == "elements" else probability**2
        deviation = (rate * (1 - rate) / dropped.numel()) ** 0.5
        assert abs(dropped.double().mean().item() - rate) < 5 * deviation, name
    # Sums of rows and of columns spread as binomial counts do.
    for dim in (0, 1):
        counts = first.double().sum(dim)
        expected = first.shape[dim] * probability * (1 - probability)
        assert 0.8 < counts.var().item() / expected < 1.25
