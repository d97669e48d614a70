"""Contract of sampling: temperature, top-k, top-p, min-p, and a draw that anyone can repeat.

Owns the meaning of each setting, the noise (a function of seed, position and token id alone) in
pure Python integers, and the law for near ties. Knows no kernel. Invariant: a token whose logit is
-inf is never drawn, and a row without one finite maximum gives -1, whatever its settings are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import UNIT_ROUNDOFF, Evidence, Verdict
from oxplow.contracts.paging import tensor_bytes
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_SALT = 0x6F78706C6F77  # keeps seed 0, position 0 away from the fixed point 0 of the mixer


def mix64(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x ^ (x >> 31)


def noise_bits(seed: int, position: int, token: int) -> int:
    """Return 32 random bits of one token: a SplitMix64 stream per (seed, position), read at token.

    Takes the high half before the mixer's last shift, which would change one of these bits only.
    """
    key = mix64((mix64((seed ^ _SEED_SALT) % _WORD) + position) % _WORD)
    x = (key + (token + 1) * _GOLDEN) % _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x >> 32


def gumbel(seed: int, position: int, token: int) -> float:
    """Return the Gumbel noise of one token; small bits give large noise, at full resolution."""
    return -math.log(-math.log1p(-(noise_bits(seed, position, token) + 0.5) / 2**32))


@dataclass(frozen=True, slots=True)
class Row:
    """One request's logits and settings, as plain Python numbers."""

    logits: list[float]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int

    @property
    def usable(self) -> bool:
        """True when there is a finite maximum and no NaN."""
        return not any(map(math.isnan, self.logits)) and math.isfinite(max(self.logits))

    def kept(self, p_slack: float = 0.0, min_slack: float = 0.0) -> list[int]:
        """Return the tokens that may be drawn, best first; a slack widens (or narrows) a cut."""
        tokens = [i for i, x in enumerate(self.logits) if x > -math.inf]
        tokens.sort(key=lambda i: (-self.logits[i], i))
        if self.top_k > 0:
            tokens = tokens[: self.top_k]
        best = self.logits[tokens[0]]
        weights = [math.exp((self.logits[i] - best) / self.temperature) for i in tokens]
        if self.top_p < 1:
            limit = (self.top_p + p_slack) * math.fsum(weights)
            size = next((n for n in range(len(tokens)) if math.fsum(weights[:n]) >= limit), None)
            tokens = tokens[: max(1, size)] if size is not None else tokens
        floor = math.log(self.min_p) - min_slack if self.min_p > 0 else -math.inf
        return tokens[:1] + [
            i for i in tokens[1:] if (self.logits[i] - best) / self.temperature >= floor
        ]

    def score(self, token: int) -> float:
        """Return what the draw maximises."""
        return self.logits[token] / self.temperature + gumbel(self.seed, self.position, token)

    def draw(self) -> int:
        """Return the token, or -1 for an unusable row; every tie goes to the lowest id."""
        if not self.usable:
            return -1
        if self.temperature <= 0:
            return self.logits.index(max(self.logits))
        return max(self.kept(), key=lambda i: (self.score(i), -i))


def rows_of(args: Mapping[str, Any]) -> list[Row]:
    """Return every request of a call."""
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return [Row(*values) for values in zip(*(args[n].tolist() for n in names), strict=True)]


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> dict[str, Tensor]:
    """Sort, cut and draw row by row in Python; every sum is exact."""
    rows = rows_of(
        {
            "logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "min_p": min_p, "seeds": seeds, "positions": positions,
        }
    )  # fmt: skip
    return {"token_ids": torch.tensor([row.draw() for row in rows], dtype=torch.int64)}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The reference's token, or one that float32 rounding may put in its place.

    A rival must be inside the cuts widened by their rounding, and its score no further below the
    best token inside the narrowed cuts than both scores' rounding. Order of logits, greedy rows and
    unusable rows are exact.
    """

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare row by row."""
        pairs = zip(evidence.got.tolist(), evidence.truth.tolist(), strict=True)
        for index, (row, (got, want)) in enumerate(zip(rows_of(evidence.args), pairs, strict=True)):
            if got != want and not (want >= 0 < row.temperature and _near_tie(row, got)):
                return Verdict(
                    ok=False,
                    worst=math.inf,
                    index=(index,),
                    reason=f"row {index}: drew {got}, wanted {want}",
                )
        return Verdict(ok=True)


def _near_tie(row: Row, token: int) -> bool:
    unit = UNIT_ROUNDOFF[torch.float32]
    largest = max(abs(x) for x in row.logits if math.isfinite(x)) / row.temperature
    # two scaled logits are subtracted and exponentiated, then up to V weights are added
    p_slack = 4 * unit * (len(row.logits) ** 0.5 + 2 * largest)
    min_slack = 4 * unit * (2 * largest + 1)
    if token not in row.kept(p_slack, min_slack):
        return False
    sure = row.kept(-p_slack, -min_slack)
    best = max(row.score(i) - _score_rounding(row, i) for i in sure)
    return row.score(token) + _score_rounding(row, token) >= best


def noise_rounding(seed: int, position: int, token: int) -> float:
    """Bound float32 noise against `gumbel`: the two logarithms, and 1 - u next to u = 1."""
    u = (noise_bits(seed, position, token) + 0.5) / 2**32
    near_one = u / ((1 - u) * -math.log1p(-u))
    return 4 * UNIT_ROUNDOFF[torch.float32] * (abs(gumbel(seed, position, token)) + 1 + near_one)


def _score_rounding(row: Row, token: int) -> float:
    """Add the rounding of logit / temperature to that of the noise."""
    scaled = abs(row.logits[token] / row.temperature)
    noise = noise_rounding(row.seed, row.position, token)
    return 4 * UNIT_ROUNDOFF[torch.float32] * scaled + noise


def _case(
    g: torch.Generator,
    logits: Tensor,
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> Args:
    """Settings are repeated over the rows; seeds and positions are drawn."""
    rows = len(logits)

    def over_rows(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor((values * rows)[:rows], dtype=dtype)

    return {
        "logits": logits,
        "temperature": over_rows(temperature, torch.float32),
        "top_k": over_rows(top_k or [0], torch.int64),
        "top_p": over_rows(top_p or [1.0], torch.float32),
        "min_p": over_rows(min_p or [0.0], torch.float32),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        "positions": torch.randint(0, 2**20, (rows,), generator=g),
    }


def _mixed_case(g: torch.Generator) -> Args:
    logits = torch.randn(24, 97, generator=g) * 3
    return _case(g, logits, [1.0, 0.0, 0.6, 1.4, 0.9], [0, 0, 5, 40], [1.0, 0.95, 0.3], [0.0, 0.05])


def _flat_case(
    g: torch.Generator, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Args:
    """Sixty-four draws from one almost flat row: a wrong cut is drawn from at once."""
    logits = (torch.randn(1, 24, generator=g) * 0.7).repeat(64, 1)
    return _case(g, logits, [temperature], [top_k], [top_p], [min_p])


def _equal_logits_case(g: torch.Generator) -> Args:
    logits = torch.randint(0, 3, (48, 31), generator=g).float()
    return _case(g, logits, [0.0, 1.0, 1.0], [0, 4, 0, 9], [1.0, 1.0, 0.25], [0.0])


def _masked_case(g: torch.Generator) -> Args:
    logits = torch.randn(36, 40, generator=g)
    logits.masked_fill_(torch.rand(36, 40, generator=g) < 0.9, -math.inf)
    logits[:, 17] = -1.0  # one token is always allowed
    logits[4, :] = -math.inf
    return _case(g, logits, [1.0, 50.0, 0.0], [0, 0, 0, 30], [1.0, 1.0, 0.9], [0.0, 0.01])


def _unusable_case(g: torch.Generator) -> Args:
    logits = torch.randn(18, 33, generator=g)
    logits[::3, 5] = math.nan
    logits[1::6, 9] = math.inf
    logits[4, :] = -math.inf
    return _case(g, logits, [0.0, 0.0, 1.0, 1.0], [0, 0, 0, 3, 3], [1.0, 0.9])


def _ends_case(g: torch.Generator) -> Args:
    logits = torch.randn(40, 19, generator=g)
    return _case(g, logits, [1.0], [0, 1, 19, 1000], [1.0, 0.0, 1e-6, 0.9999, 1.0], [0.0, 1.0])


def _cost(args: Args) -> Cost:
    """Read the logits once; one hash of about 12 integer operations and a comparison a token."""
    drawn = int((args["temperature"] > 0).sum()) * args["logits"].shape[1]
    moved = tensor_bytes(*args.values()) + 8 * len(args["logits"])
    return Cost(bytes=moved, flops=args["logits"].numel() + 20 * drawn)


def _settings_in_range(args: Args) -> bool:
    top_p, min_p, heat = args["top_p"], args["min_p"], args["temperature"]
    inside = [(x >= 0) & (x <= 1) for x in (top_p, min_p)]
    # below 1e-4 a scaled logit leaves float32's exact integers: ask for 0 instead
    return bool(torch.stack([*inside, (heat == 0) | (heat >= 1e-4)]).all())


SAMPLE = OpContract(
    name="sample",
    summary="A token per row: temperature, top-k, top-p, min-p, then a repeatable Gumbel-max draw",
    source="model.md 3; Gumbel 1954; Steele, Lea and Flood 2014 for the hash",
    axes={"N": "rows", "Vo": "vocabulary"},
    inputs={
        "logits": tensor(Role.F32, "N Vo"),
        "temperature": tensor(Role.F32, "N"),  # 0: the first of the largest logits
        "top_k": tensor(Role.INT, "N"),  # 0: off; ties at the cut go to the lowest id
        # the smallest set, best first, whose share of what top-k left is at least top_p; 1: off
        "top_p": tensor(Role.F32, "N"),
        "min_p": tensor(Role.F32, "N"),  # share of the best token's probability; 0: off
        "seeds": tensor(Role.INT, "N"),
        "positions": tensor(Role.INT, "N"),  # of the drawn token in its request
    },
    outputs={"token_ids": tensor(Role.INT, "N")},
    reference=sample_reference,
    dtypes=(torch.float32,),
    constraints=(
        Constraint("at least one token", lambda a: a["logits"].shape[1] >= 1),
        Constraint("0 <= top_p, min_p <= 1; temperature is 0 or at least 1e-4", _settings_in_range),
        Constraint("top_k is not negative", lambda a: bool((a["top_k"] >= 0).all())),
    ),
    cases=(
        Case("mixed_settings", CaseKind.ORDINARY, _mixed_case),
        Case(
            "defaults",
            CaseKind.ORDINARY,
            lambda g: _case(g, torch.randn(6, 301, generator=g) * 2, [1.0], top_p=[0.95]),
        ),
        Case(
            "no_filters",
            CaseKind.ORDINARY,
            lambda g: _case(g, torch.randn(9, 301, generator=g) * 2, [1.0, 0.7]),
        ),
        Case("no_rows", CaseKind.EDGE, lambda g: _case(g, torch.randn(0, 7, generator=g), [1.0])),
        Case(
            "one_token",
            CaseKind.EDGE,
            lambda g: _case(g, torch.randn(4, 1, generator=g), [0.0, 1.0], top_p=[1.0, 0.5]),
        ),
        Case("settings_at_their_ends", CaseKind.EDGE, _ends_case),
        Case("unusable_rows", CaseKind.EDGE, _unusable_case),
        Case(
            "equal_logits",
            CaseKind.EXCITATION,
            _equal_logits_case,
            note="ties at every cut and at the maximum: a rule other than the lowest id",
        ),
        Case(
            "masked",
            CaseKind.EXCITATION,
            _masked_case,
            note="grammar masks, hot rows: a -inf token drawn, or top-k filled up with them",
        ),
        Case(
            "flat_top_p",
            CaseKind.EXCITATION,
            lambda g: _flat_case(g, 1.0, top_p=0.5),
            note="the token that crosses top_p dropped, or one too many kept",
        ),
        Case(
            "flat_top_k_then_top_p",
            CaseKind.EXCITATION,
            lambda g: _flat_case(g, 1.0, top_k=8, top_p=0.6),
            note="top-p on shares of the whole vocabulary, or the two cuts in the other order",
        ),
        Case(
            "hot_min_p",
            CaseKind.EXCITATION,
            lambda g: _flat_case(g, 2.5, min_p=0.6),
            note="min-p as a probability of its own, or before the temperature",
        ),
    ),
    checks={"token_ids": Drawn()},
    cost=_cost,
)

CONTRACTS = (SAMPLE,)
