"""The host tier keeps as many bytes as it may, the ones used last, and what is pinned."""

from __future__ import annotations

import numpy as np

from jaxengine.tiers.host import ARC, HostTier


def block(number: int, size: int = 10) -> np.ndarray:
    return np.full(size, number, np.uint8)


def key(number: int) -> bytes:
    return bytes([number])


def test_the_least_recently_used_makes_room():
    tier = HostTier(30)
    for number in range(3):
        assert tier.put(key(number), block(number))
    found = tier.get(key(0))
    assert found is not None and found[0] == 0
    assert tier.put(key(3), block(3))
    assert key(1) not in tier and all(key(number) in tier for number in (0, 2, 3))
    assert (tier.num_bytes, len(tier), tier.num_evicted) == (30, 3, 1)
    assert not tier.put(key(4), block(4, 31)) and len(tier) == 3
    tier.clear()
    assert (tier.num_bytes, len(tier)) == (0, 0)


def test_pinned_blocks_stay():
    tier = HostTier(30)
    tier.pin([key(0), key(1), key(9)])  # one comes later
    tier.pin([key(0)])
    for number in range(6):
        tier.put(key(number), block(number))
    assert key(0) in tier and key(1) in tier and key(5) in tier
    assert tier.put(key(9), block(9)) and not tier.put(key(7), block(7))
    tier.unpin([key(0), key(1), key(9)])
    assert tier.put(key(7), block(7)) and tier.put(key(8), block(8))
    assert key(0) in tier  # it has been pinned twice
    tier.unpin([key(0)])
    assert tier.put(key(6), block(6)) and key(0) not in tier


def test_a_scan_does_not_push_out_what_is_used_again():
    def hits(policy: str) -> int:
        tier, found, scanned = HostTier(100, policy), 0, 100
        for _ in range(20):
            for number in range(5):  # used in every round
                found += tier.get(key(number)) is not None
                tier.put(key(number), block(number))
            for _ in range(8):  # never again
                scanned += 1
                tier.put(scanned.to_bytes(3, "big"), block(0))
            assert tier.num_bytes <= 100
        return found

    assert hits(ARC) >= 80 > 5 >= hits("lru")
