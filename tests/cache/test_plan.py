"""The byte plan: exact numbers, growth only where caches grow, refusal with figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxplow.cache.plan import CacheBudget, blocks_for, exact_plan, plan_cache
from oxplow.cache.spec import Component, Per
from oxplow.errors import ConfigError

BLOCK = 64
MIB = 2**20


def flash_components() -> list[Component]:
    """The caches of the released model: 34 recurrent layers, 11 attention layers, bf16 latents."""
    attention = (
        ("latent", Per.BLOCK, (BLOCK, 512), "bfloat16"),
        ("pool_keys", Per.BLOCK, (BLOCK // 4, 128), "bfloat16"),
        ("tail_key", Per.SLOT, (3, 128), "bfloat16"),
        ("tail_gate", Per.SLOT, (3, 128), "bfloat16"),
    )
    recurrent = (
        ("state", Per.SLOT, (64, 128, 128), "float32"),
        ("window", Per.SLOT, (3, 8192, 3), "bfloat16"),
    )
    return [
        Component(layer=layer, name=name, per=per, shape=shape, dtype=dtype)
        for layer in range(45)
        for name, per, shape, dtype in (attention if layer % 4 == 3 else recurrent)
    ]


def test_only_attention_layers_grow_with_the_context() -> None:
    plan = exact_plan(flash_components(), BLOCK, num_blocks=16384, num_slots=1, num_snapshots=0)
    assert plan.block_bytes == BLOCK * (11264 + 704)
    assert plan.slot_bytes == pytest.approx((136 + 4.78) * MIB, rel=2e-3)
    for tokens, mib in ((1024, 152), (131072, 1637), (1 << 20, 12109)):
        assert plan.request_bytes(tokens) / MIB == pytest.approx(mib, rel=5e-3)


@given(
    budget=st.integers(0, 64 * 2**30),
    slots=st.integers(1, 64),
    length=st.sampled_from([4096, 131072, 1 << 20]),
    share=st.floats(0, 0.9),
)
def test_a_plan_stays_inside_its_budget_and_holds_the_longest_request(
    budget: int, slots: int, length: int, share: float
) -> None:
    asked = CacheBudget(
        total_bytes=budget, num_slots=slots, max_model_len=length, snapshot_share=share
    )
    components = flash_components()
    try:
        plan = plan_cache(components, BLOCK, asked)
    except ConfigError as refusal:
        assert str(budget) in str(refusal)
        assert str(length) in str(refusal)
        return
    assert plan.total_bytes <= budget
    assert budget - plan.total_bytes < plan.block_bytes
    assert plan.num_snapshots * plan.slot_bytes <= budget * share
    assert plan.requests_of(length) >= 1


def test_the_plan_says_how_many_requests_of_which_length_fit() -> None:
    plan = exact_plan(flash_components(), BLOCK, num_blocks=4096, num_slots=16, num_snapshots=2)
    assert plan.requests_of(1024) == 16
    assert plan.requests_of(131072) == 2
    text = "\n".join(plan.lines())
    assert "16 of 1024" in text
    assert "2 of 131072" in text
    assert "4096 blocks of 64 tokens" in text


def test_a_plan_that_cannot_hold_one_full_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="longest length"):
        exact_plan(
            flash_components(), BLOCK, num_blocks=3, num_slots=1, num_snapshots=0, max_model_len=193
        )


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_are_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, BLOCK) == blocks
