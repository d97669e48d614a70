"""The cache manager under random histories, against a shadow memory that knows what is where."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oxplow.cache.manager import CacheManager, Hit, MissReason
from oxplow.cache.plan import CachePlan, blocks_for
from oxplow.cache.prefix import KeyChain, SnapshotKind, root_key

BLOCK = 4


def make_plan(*, blocks: int = 12, slots: int = 3, snapshots: int = 3) -> CachePlan:
    return CachePlan(
        block_size=BLOCK,
        num_blocks=blocks,
        num_slots=slots,
        num_snapshots=snapshots,
        block_bytes=1,
        slot_bytes=1,
        max_model_len=blocks * BLOCK,
    )


def chain_of(token_ids: list[int], salt: str = "") -> KeyChain:
    chain = KeyChain(root_key(revision="r", layout="l", salt=salt), BLOCK)
    chain.extend(token_ids)
    return chain


# Two stems, cut anywhere and left for another tail: most texts share their beginning with others.
texts = st.builds(
    lambda stem, shared, tail: [stem] * shared + [2] * tail,
    st.integers(0, 1),
    st.integers(1, 24),
    st.integers(0, 9),
)


@dataclass
class Owner:
    """What the test believes of one owner."""

    token_ids: list[int]
    chain: KeyChain
    computed: int
    reserve: int
    own_blocks: list[int] = field(default_factory=list)


class ManagerMachine(RuleBasedStateMachine):
    """Admits, computes, keeps and frees at random.

    The shadow memory maps a block to the whole text up to its end and a slot to the text that its
    state has seen. Whatever a look-up offers must hold exactly the text asked for: what was reused
    too early, restored from a wrong slot or found under a wrong key shows at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(make_plan())
        self.owners: dict[str, Owner] = {}
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.names = 0

    @rule(text=texts, answer=st.integers(0, 12))
    def admit(self, text: list[int], answer: int) -> None:
        chain = chain_of(text)
        hit = self.manager.lookup(chain, len(text))
        self._check_hit(text, hit)
        reserve = min(len(text) + answer, 12 * BLOCK)
        fits = self.manager.fits(hit, reserve)
        assert (
            fits
            or self.manager.slots.num_available == 0
            or (self.manager.missing_blocks(hit, reserve) > 0)
        )
        if not fits:
            return
        self.names += 1
        name = f"owner {self.names}"
        holding = self.manager.admit(name, hit, reserve)
        self.slots[holding.slot] = ()
        if hit.snapshot is not None:
            self.slots[holding.slot] = self.slots[hit.snapshot.slot]
        assert self.slots[holding.slot] == tuple(text[: hit.tokens])
        self.owners[name] = Owner(text, chain, hit.tokens, reserve)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 9), keep=st.booleans())
    def compute(self, data: st.DataObject, count: int, keep: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[name]
        stop = min(owner.computed + count, len(owner.token_ids))
        if stop == owner.computed:  # decode: a token that nobody knew
            owner.token_ids = [*owner.token_ids, data.draw(st.integers(0, 1))]
            stop = owner.computed + 1
        grown = self.manager.grow(name, stop)
        assert grown or stop > owner.reserve, "growth inside the promise failed"
        if not grown:
            owner.token_ids = owner.token_ids[: owner.computed]
            return
        holding = self.manager.holdings[name]
        for position in range(owner.computed, stop):
            block = holding.block_ids[position // BLOCK]
            assert self.manager.blocks.references(block) == 1, "a shared block was written"
            self.blocks[block] = tuple(owner.token_ids[: position + 1])
        owner.computed = stop
        self.slots[holding.slot] = tuple(owner.token_ids[:stop])
        owner.chain.extend(owner.token_ids)
        self.manager.publish(name, owner.chain, stop)
        if keep:
            kind = data.draw(st.sampled_from(SnapshotKind))
            copy = self.manager.snapshot(name, owner.chain, stop, kind)
            if copy is not None:
                source, target = copy
                assert stop % BLOCK == 0
                self.slots[target] = self.slots[source]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        self.manager.release(name)
        del self.owners[name]

    @rule(text=texts)
    def look(self, text: list[int]) -> None:
        self._check_hit(text, self.manager.lookup(chain_of(text), len(text)))
        other = self.manager.lookup(chain_of(text, "another tenant"), len(text))
        assert other.tokens == other.matched_tokens == 0

    @invariant()
    def conserved(self) -> None:
        self.manager.check()

    def teardown(self) -> None:
        for name in list(self.owners):
            self.manager.release(name)
        self.manager.check()
        assert self.manager.blocks.num_available == 12
        assert self.manager.slots.num_available == 3

    def _check_hit(self, text: list[int], hit: Hit) -> None:
        assert hit.tokens < len(text), "nothing is left to compute"
        assert hit.tokens % BLOCK == 0
        assert hit.tokens <= hit.matched_tokens
        for i, block in enumerate(hit.block_ids):
            assert self.blocks[block] == tuple(text[: (i + 1) * BLOCK])
        if hit.tokens:
            assert hit.snapshot is not None
            assert self.slots[hit.snapshot.slot] == tuple(text[: hit.tokens])


TestCacheManager = ManagerMachine.TestCase
TestCacheManager.settings = settings(max_examples=150, stateful_step_count=40)


def compute(
    manager: CacheManager, name: str, text: list[int], kinds: dict[int, SnapshotKind]
) -> Hit:
    """Admit, compute the whole text block by block, take the wanted snapshots, release."""
    chain = chain_of(text)
    hit = manager.lookup(chain, len(text))
    manager.admit(name, hit, len(text))
    for stop in [*range(hit.tokens + BLOCK, len(text), BLOCK), len(text)]:
        assert manager.grow(name, stop)
        manager.publish(name, chain, stop)
        if stop in kinds:
            manager.snapshot(name, chain, stop, kinds[stop])
    manager.release(name)
    return hit


def test_miss_reasons_name_what_is_missing() -> None:
    manager = CacheManager(make_plan())
    text = list(range(20))

    def miss(ids: list[int]) -> MissReason:
        return manager.lookup(chain_of(ids), len(ids)).miss

    assert miss(text[:4]) is MissReason.SHORT
    assert miss(text) is MissReason.COLD
    compute(manager, "a", text, {8: SnapshotKind.SPACED})
    assert miss(text) is MissReason.NO_SNAPSHOT
    assert miss([*text[:8], *[99] * 12]) is MissReason.DIVERGED
    assert miss(text[:12]) is MissReason.NONE
    assert manager.lookup(chain_of(text), 20, allowed=False).miss is MissReason.SWITCHED_OFF
    without = CacheManager(make_plan(snapshots=0))
    assert without.lookup(chain_of(text), 20).miss is MissReason.SWITCHED_OFF


def test_usable_hit_is_the_deepest_position_that_all_parts_have() -> None:
    manager = CacheManager(make_plan())
    text = list(range(20))
    compute(manager, "a", text, {8: SnapshotKind.SPACED})
    hit = manager.lookup(chain_of(text), 20)
    assert (hit.tokens, hit.matched_tokens) == (8, 16)


def test_a_snapshot_goes_with_its_block() -> None:
    manager = CacheManager(make_plan(blocks=4))
    compute(manager, "a", list(range(9)), {4: SnapshotKind.SPACED, 8: SnapshotKind.PROMPT_END})
    assert len(manager.snapshots) == 2
    compute(manager, "b", list(range(50, 63)), {})
    manager.check()
    assert manager.lookup(chain_of(list(range(9))), 9).tokens == 0
    assert len(manager.snapshots) == 0


def test_promises_are_kept_when_others_want_to_grow() -> None:
    manager = CacheManager(make_plan(blocks=6, slots=2))
    nothing = Hit(0, 0, (), None, MissReason.COLD)
    manager.admit("patient", nothing, 4 * BLOCK)
    manager.admit("greedy", nothing, 1 * BLOCK)
    assert manager.grow("greedy", 2 * BLOCK)
    assert not manager.grow("greedy", 3 * BLOCK)
    assert manager.grow("patient", 4 * BLOCK)
    manager.check()


def test_idle_blocks_of_a_hit_count_as_used_up() -> None:
    manager = CacheManager(make_plan(blocks=5, slots=2))
    text = list(range(13))
    compute(manager, "a", text, {12: SnapshotKind.PROMPT_END})
    hit = manager.lookup(chain_of(text), 13)
    assert (hit.tokens, manager.blocks.num_available) == (12, 5)
    assert manager.missing_blocks(hit, 6 * BLOCK) == 1
    assert not manager.fits(hit, 6 * BLOCK), "three of the five are the hit's own"
    manager.admit("b", hit, 5 * BLOCK)
    manager.check()


def test_the_deepest_of_several_snapshots_is_used() -> None:
    manager = CacheManager(make_plan())
    text = list(range(20))
    compute(manager, "a", text, dict.fromkeys((4, 8, 12), SnapshotKind.SPACED))
    hit = manager.lookup(chain_of(text), 20)
    assert hit.snapshot is not None
    assert (hit.tokens, hit.snapshot.position) == (12, 12)


def test_admission_without_room_takes_nothing() -> None:
    manager = CacheManager(make_plan(blocks=4, slots=1))
    nothing = Hit(0, 0, (), None, MissReason.COLD)
    assert not manager.fits(nothing, 5 * BLOCK)
    manager.admit("a", nothing, 4 * BLOCK)
    assert not manager.fits(nothing, 1)
    manager.check()


def test_scattered_blocks_serve_a_request_that_fits_nowhere_in_one_piece() -> None:
    manager = CacheManager(make_plan(blocks=12, slots=13, snapshots=0))
    nothing = Hit(0, 0, (), None, MissReason.COLD)
    for i in range(12):
        manager.admit(f"{i}", nothing, BLOCK)
        assert manager.grow(f"{i}", BLOCK)
    for i in range(0, 12, 2):
        manager.release(f"{i}")
        manager.check()
    free = set(range(12)) - {b for h in manager.holdings.values() for b in h.block_ids}
    assert all(b + 1 not in free for b in free), "the test wants scattered blocks"
    assert manager.fits(nothing, 6 * BLOCK)
    assert not manager.fits(nothing, 6 * BLOCK + 1)
    manager.admit("large", nothing, 6 * BLOCK)
    assert manager.grow("large", 6 * BLOCK)
    assert set(manager.holdings["large"].block_ids) == free
    manager.check()


def test_answer_snapshots_of_one_owner_replace_each_other_until_used() -> None:
    manager = CacheManager(make_plan())
    text = list(range(24))
    chain = chain_of(text)
    manager.admit("a", Hit(0, 0, (), None, MissReason.COLD), 24)
    for stop in (8, 12, 16):
        manager.grow("a", stop)
        manager.publish("a", chain, stop)
        assert manager.snapshot("a", chain, stop, SnapshotKind.ANSWER) is not None
        assert len(manager.snapshots) == 1
    used = manager.snapshots.find(chain.keys[3])
    assert used is not None
    manager.snapshots.hit(used)
    manager.grow("a", 20)
    manager.publish("a", chain, 20)
    manager.snapshot("a", chain, 20, SnapshotKind.ANSWER)
    assert len(manager.snapshots) == 2


def test_a_position_inside_a_block_is_never_kept() -> None:
    manager = CacheManager(make_plan())
    text = list(range(10))
    chain = chain_of(text)
    manager.admit("a", Hit(0, 0, (), None, MissReason.COLD), 10)
    manager.grow("a", 10)
    manager.publish("a", chain, 10)
    assert manager.snapshot("a", chain, 10, SnapshotKind.PROMPT_END) is None


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9])
def test_one_token_is_always_left_to_compute(num_tokens: int) -> None:
    manager = CacheManager(make_plan())
    text = list(range(num_tokens))
    compute(manager, "a", text, dict.fromkeys((4, 8), SnapshotKind.SPACED))
    hit = manager.lookup(chain_of(text), num_tokens)
    assert hit.tokens == (num_tokens - 1) // BLOCK * BLOCK
    assert blocks_for(hit.tokens, BLOCK) == len(hit.block_ids)
