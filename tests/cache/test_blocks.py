"""Blocks and slots: three states, reference counts, and no unit ever lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oxplow.cache.blocks import BlockPool, SlotPool
from oxplow.errors import CapacityError


class BlockPoolMachine(RuleBasedStateMachine):
    """Takes, shares, publishes and releases at random; conservation is checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.pool = BlockPool(7, self.evicted.append)
        self.held: list[list[int]] = []
        self.names = 0

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        before = self.pool.num_available
        if count > before:
            with pytest.raises(CapacityError):
                self.pool.take(count)
            assert self.pool.num_available == before
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not {b for blocks in self.held for b in blocks} & set(taken)
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from([b for b in self.held if b]))
        block = data.draw(st.sampled_from(blocks))
        if self.pool.key_of(block) is None:
            self.names += 1
            key = b"%d" % self.names
            assert self.pool.publish(block, key)
            assert self.pool.find(key) == block

    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        known = [n for n in range(1, self.names + 1) if self.pool.find(b"%d" % n) is not None]
        if known:
            block = self.pool.find(b"%d" % data.draw(st.sampled_from(known)))
            assert block is not None
            self.pool.share([block])
            self.held.append([block])

    @rule()
    def drop_idle(self) -> None:
        idle = self.pool.num_idle
        assert self.pool.drop_idle() == idle
        assert self.pool.num_idle == 0

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        count: dict[int, int] = {}
        for block in (b for blocks in self.held for b in blocks):
            count[block] = count.get(block, 0) + 1
        assert all(self.pool.references(b) == count.get(b, 0) for b in range(7))
        assert all(self.pool.find(k) is None for k in self.evicted)


TestBlockPool = BlockPoolMachine.TestCase


def test_content_is_given_up_oldest_first_and_from_the_end_of_a_sequence() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    for blocks, names in ((first, (b"a0", b"a1")), (second, (b"b0", b"b1"))):
        for block, name in zip(blocks, names, strict=True):
            pool.publish(block, name)
    pool.release(first)
    pool.release(second)
    pool.take(1)
    assert pool.find(b"a1") is None
    assert pool.find(b"a0") is not None
    pool.take(1)
    assert pool.find(b"a0") is None
    assert pool.find(b"b0") is not None


def test_release_of_an_unheld_block_is_our_own_fault() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([0])


@given(st.lists(st.booleans(), max_size=40))
def test_slots_are_free_or_held(takes: list[bool]) -> None:
    pool = SlotPool(3, 4)
    held: list[int] = []
    for take in takes:
        if take and len(held) == 4:
            with pytest.raises(CapacityError):
                pool.take()
        elif take:
            held.append(pool.take())
        elif held:
            pool.release(held.pop(0))
        pool.check()
        assert len(set(held)) == len(held) == pool.num_held
        assert set(held) <= {3, 4, 5, 6}


def test_content_computed_again_replaces_its_idle_copy() -> None:
    evicted: list[bytes] = []
    pool = BlockPool(3, evicted.append)
    old = pool.take(1)
    pool.publish(old[0], b"a")
    pool.release(old)
    new = pool.take(1)
    assert pool.publish(new[0], b"a")
    pool.check()
    assert pool.find(b"a") == new[0]
    assert pool.num_available == 2
    other = pool.take(1)
    assert not pool.publish(other[0], b"a"), "a held copy stays"
    assert not evicted, "the content never went away"
