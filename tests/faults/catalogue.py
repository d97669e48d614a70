"""All planted faults, all controls, and the faults that this engine cannot have yet.

Owns the lists. Invariant: ids are unique, and every fault of the benchmark's table is in exactly
one of the lists.
"""

from tests.faults import clean_engine, clean_ops, concurrency, numeric, performance, state
from tests.faults.record import NotApplicable

FAULTS = tuple(
    sorted(
        (*numeric.FAULTS, *state.FAULTS, *concurrency.FAULTS, *performance.FAULTS),
        key=lambda fault: fault.id,
    )
)

CONTROLS = (*clean_ops.CONTROLS, *clean_engine.CONTROLS)

NOT_APPLICABLE = (
    NotApplicable(
        id="F05",
        title="YaRN softmax factor missing",
        why="the text tower has no positions: there is no YaRN, and no softmax factor beside the"
        " head size's",
    ),
    NotApplicable(
        id="F07",
        title="scales of an fp8 cache lost",
        why="caches are float32 or bfloat16 so far; it follows with quantised caches",
    ),
    NotApplicable(
        id="F12",
        title="stale batch-to-request map under pipeline parallelism",
        why="there is no pipeline parallelism, and a step's rows are built from the plan anew",
    ),
    NotApplicable(
        id="F14",
        title="draft steps share a metadata buffer",
        why="the engine does not draft yet; it follows with speculative decoding",
    ),
    NotApplicable(
        id="F15",
        title="expert ids not remapped after a rebalance",
        why="experts are not placed on ranks yet; it follows with expert parallelism",
    ),
    NotApplicable(
        id="F19",
        title="metadata buffer index reused between prefill and decode workers",
        why="there are no split workers yet; it follows with them",
    ),
    NotApplicable(
        id="F20",
        title="offload copy not ordered after compute",
        why="copies to the host are synchronous; it follows with overlapped offload",
    ),
    NotApplicable(
        id="F21",
        title="collective without an end barrier",
        why="one rank, no collectives; it follows with tensor parallelism",
    ),
    NotApplicable(
        id="F22",
        title="ranks sum in different orders",
        why="one rank; it follows with tensor parallelism",
    ),
    NotApplicable(
        id="F25",
        title="replay reads a buffer frozen at capture",
        why="steps are not captured yet; it follows with graph replay",
    ),
    NotApplicable(
        id="F26",
        title="GIL held in a native transfer",
        why="no native call of the engine transfers anything yet; the stand-in with its own"
        " extension is a case of its own, outside this engine",
    ),
    NotApplicable(
        id="F31",
        title="affinity score always zero",
        why="there is no router between servers yet; it follows with it",
    ),
)
