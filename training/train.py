"""Trains the nano model stage by stage within a time budget.

Owns the curriculum, the workers, logs and saved states. Run on one GPU; `--cpu` rehearses a few
steps in plain torch. Invariant: a run that continues from `--load` has the same weights and moments
as one that never stopped.

    python -m training.train --tokens DIR --tokenizer FILE --stages 0,1 --save STATE --out OUT
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import multiprocessing as mp
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from training.corpus import SPECIAL_TOKENS, VOCAB_SIZE
from training.dev import examine
from training.evaluate import Judge, evaluate, round_to_stored
from training.export import write_weights
from training.families import PICTURE_SEED, training_words
from training.generators.mix import Batch, Mix, Mixer
from training.kernels import cpu_backend, gpu_backend
from training.load import load_checkpoint
from training.model import Nano, count_parameters
from training.optim import Optimiser
from training.render import Renderer, build_atlas
from training.shape import NanoShape
from training.step import METRICS, TrainingStep

LOG_EVERY = 50
FEED_SECONDS = 60.0
WORD_SAMPLE = 3_000_000
# Haystacks of 16 questions by context length.
QUICK_STACKS = {1024: 6, 4096: 4}
FULL_STACKS = {1024: 8, 2048: 8, 4096: 8, 8192: 8, 16384: 4, 32768: 2}
REHEARSAL_LENGTH, REHEARSAL_TOPK = 256, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the curriculum: context, attention, time, tokens a step, learning-rate factors at
    its two ends, mix.
    """

    length: int
    seconds: float
    sparse: bool = False
    tokens: int = 32_768
    rate: tuple[float, float] = (1.0, 1.0)
    mix: Mix


SECOND_MIX = Mix(0.2, 0.45, 0.35, 0.5, 40)
CURRICULUM: tuple[Stage, ...] = (
    Stage(length=256, seconds=45, mix=Mix(0.1, 0, 0.9, 0.85, 448)),
    Stage(length=1024, seconds=90, mix=Mix(0.3, 0.35, 0.35, 0.6, 96)),
    Stage(length=2048, seconds=400, mix=Mix(0.4, 0.3, 0.3, 0.6, 96)),
    Stage(length=4096, seconds=180, mix=Mix(0.45, 0.3, 0.25, 0.6, 96)),
    Stage(length=2048, seconds=75, mix=Mix(0.25, 0.3, 0.45, 0.5, 96)),
    Stage(length=8192, seconds=130, rate=(1.0, 0.02), mix=Mix(0.42, 0.3, 0.28, 0.5, 96)),
    Stage(
        length=8192, seconds=130, sparse=True, rate=(1.0, 0.02), mix=Mix(0.42, 0.3, 0.28, 0.5, 96)
    ),
    # The second training, from the weights of the first.
    Stage(length=1024, seconds=100, mix=SECOND_MIX),
    Stage(length=2048, seconds=260, mix=SECOND_MIX),
    Stage(length=4096, seconds=140, rate=(1.0, 0.85), mix=SECOND_MIX),
    Stage(length=2048, seconds=150, rate=(0.85, 0.65), mix=SECOND_MIX),
    Stage(length=4096, seconds=150, rate=(0.65, 0.45), mix=SECOND_MIX),
    Stage(length=8192, seconds=200, rate=(0.45, 0.2), mix=SECOND_MIX),
    Stage(length=8192, seconds=240, sparse=True, rate=(0.2, 0.02), mix=SECOND_MIX),
)


@dataclass(frozen=True, slots=True)
class Materials:
    """What workers need: tokenizer file, corpus tokens, words, atlas cell names."""

    tokenizer: str
    tokens: np.ndarray
    words: list[str]
    atlas_names: list[str]


def load_tokens(folder: Path) -> np.ndarray:
    """Unpack every shard of tokens, uint16; specials that source texts spell are dropped."""
    files = sorted(folder.glob("tokens_*.xz"))
    if not files:
        raise FileNotFoundError(f"no tokens_*.xz in {folder}")
    with ThreadPoolExecutor(8) as pool:
        parts = list(
            pool.map(
                lambda file: np.frombuffer(lzma.decompress(file.read_bytes()), np.uint16), files
            )
        )
    tokens = np.concatenate(parts)
    return tokens[tokens <= VOCAB_SIZE - len(SPECIAL_TOKENS)]


def produce(
    queue: mp.Queue, materials: Materials, stages: list[Stage], current: mp.Value, seed: int
) -> None:
    """Worker loop: make batches of the current stage for ever."""
    mixer = Mixer(
        materials.tokenizer, materials.tokens, materials.words, materials.atlas_names, seed
    )
    while True:
        index = current.value
        stage = stages[index]
        queue.put((index, mixer.batch(stage.tokens // stage.length, stage.length, stage.mix)))


class Feed:
    """Worker processes and their queue; batches of past stages are thrown away."""

    def __init__(self, materials: Materials, stages: list[Stage], workers: int, seed: int) -> None:
        context = mp.get_context("fork")
        self.queue, self.current = context.Queue(24), context.Value("i", 0)
        arguments = (self.queue, materials, stages, self.current)
        self.workers = [
            context.Process(target=produce, args=(*arguments, seed + i), daemon=True)
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def next(self, index: int) -> Batch:
        """Return the next batch of stage `index`; raises queue.Empty when the workers have died."""
        self.current.value = index
        while True:
            made_for, batch = self.queue.get(timeout=FEED_SECONDS)
            if made_for == index:
                return batch

    def stop(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.terminate()


class Log:
    """Collects metrics, prints one line every LOG_EVERY steps, and stops a run that goes wrong."""

    def __init__(self, path: Path, seen: int, worst: float) -> None:
        self.path, self.seen, self.rows, self.start = path, seen, [], time.time()
        self.worst = worst
        self.pending: list[torch.Tensor] = []

    def add(self, values: torch.Tensor, stage: Stage, step: int) -> None:
        """Record one step."""
        self.pending.append(values)
        self.seen += stage.tokens
        if len(self.pending) >= LOG_EVERY:
            self.flush(stage, step)

    def flush(self, stage: Stage, step: int) -> None:
        """Average, print and check the pending steps."""
        if not self.pending:
            return
        values = torch.stack(self.pending).float().mean(0).tolist()
        elapsed, count = time.time() - self.start, len(self.pending)
        named = {name: round(value, 4) for name, value in zip(METRICS, values, strict=True)}
        rate = round(count * stage.tokens / elapsed)
        row = {
            "step": step,
            "tokens": self.seen,
            "length": stage.length,
            "sparse": stage.sparse,
            "rate": rate,
        }
        self.rows.append(row | named)
        self.path.write_text(json.dumps(self.rows))
        print(
            f"{step} {self.seen / 1e6:.1f}M T{stage.length}{'s' if stage.sparse else ''}",
            *(f"{k} {v:.3f}" for k, v in named.items()),
            f"{rate / 1e3:.0f}K/s",
            flush=True,
        )
        self.pending, self.start = [], time.time()
        if not named["corpus"] < self.worst or (self.seen > 30e6 and named["corpus"] > 6.5):
            raise SystemExit(f"the run goes wrong: {named}")


@dataclass(slots=True)
class Progress:
    """Steps and tokens done so far, over all runs."""

    step: int = 0
    tokens: int = 0


def save_state(path: Path, model: Nano, optimiser: Optimiser, progress: Progress) -> None:
    """Write weights, moments and progress."""
    torch.save(
        {
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "progress": asdict(progress),
        },
        path,
    )


def run_stage(
    index: int,
    stage: Stage,
    feed: Feed,
    step: TrainingStep,
    log: Log,
    progress: Progress,
    stop: float,
) -> None:
    """Train one stage until its time, or the run's at `stop`, is over; capture and compilation do
    not count for the stage.
    """
    begin = None
    while begin is None or time.time() < min(stop, begin + stage.seconds):
        batch = feed.next(index)
        share = 0.0 if begin is None else (time.time() - begin) / stage.seconds
        factor = stage.rate[0] + (stage.rate[1] - stage.rate[0]) * share
        step.optimiser.set_factor(factor * min(1.0, (progress.step + 1) / 100))
        log.add(step(batch), stage, progress.step)
        progress.step += 1
        progress.tokens = log.seen
        if begin is None and step.is_ready:
            begin = log.start = time.time()
            log.pending = []
    log.flush(stage, progress.step)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument(
        "--stages",
        default="0,1,2,3,4,5",
        help="indices into CURRICULUM, index:seconds to change its time",
    )
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no step is begun"
    )
    parser.add_argument("--worst", type=float, default=9.5, help="stop at a corpus loss over this")
    parser.add_argument("--evaluate", choices=("no", "dev", "quick", "full"), default="no")
    parser.add_argument(
        "--export", action="store_true", help="write the weights in the released layout to --out"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="rehearse in plain torch with short rows"
    )
    return parser.parse_args()


def chosen_stages(text: str, cpu: bool) -> list[Stage]:
    """Return the stages named on the command line."""
    stages = []
    for part in text.split(","):
        index, _, seconds = part.partition(":")
        stage = CURRICULUM[int(index)]
        if seconds:
            stage = replace(stage, seconds=float(seconds))
        if cpu:
            length = REHEARSAL_LENGTH
            stage = replace(stage, length=length, tokens=length, mix=replace(stage.mix, slots=8))
        stages.append(stage)
    return stages


def main() -> None:
    """Train the chosen stages."""
    args = parse_arguments()
    from tokenizers import Tokenizer

    stop = time.time() + args.limit
    torch.manual_seed(args.seed)
    stages = chosen_stages(args.stages, args.cpu)
    names, atlas = build_atlas()
    tokens = load_tokens(args.tokens)
    sample = tokens[:WORD_SAMPLE].tolist()
    words = training_words(Tokenizer.from_file(str(args.tokenizer)).decode(sample))
    materials = Materials(str(args.tokenizer), tokens, words, names)
    feed = Feed(materials, stages, args.workers, PICTURE_SEED + 1000 * args.seed)
    device = torch.device("cpu" if args.cpu else "cuda")
    shape = NanoShape(index_topk=REHEARSAL_TOPK) if args.cpu else NanoShape()
    model = Nano(shape, cpu_backend() if args.cpu else gpu_backend()).to(device)
    optimiser = Optimiser(model, model.backend.dtype, capturable=not args.cpu)
    progress = Progress()
    if args.load and args.load.is_dir():
        load_checkpoint(model, args.load)
    elif args.load:
        saved = torch.load(args.load, map_location=device)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        progress = Progress(**saved["progress"])
    print(
        f"{count_parameters(model) / 1e6:.2f} M parameters, {len(tokens) / 1e6:.1f} M tokens",
        flush=True,
    )
    renderer, log = (
        Renderer(atlas, device),
        Log(args.out / f"log_{args.seed}.json", progress.tokens, args.worst),
    )
    for index, stage in enumerate(stages):
        rows = stage.tokens // stage.length
        step = TrainingStep(
            model, optimiser, renderer, rows, stage.length, stage.mix.slots, stage.sparse
        )
        run_stage(index, stage, feed, step, log, progress, stop)
        del step
        if args.save:
            save_state(args.save, model, optimiser, progress)
        if args.export:
            write_weights(args.out, model.state_dict(), shape)
    feed.stop()
    if args.evaluate != "no":
        report(args, model, tokens)


def report(args: argparse.Namespace, model: Nano, tokens: np.ndarray) -> None:
    """Evaluate the rounded weights, print and write the figures."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    round_to_stored(model)
    judge = Judge(
        model,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        tokenizer.token_to_id,
    )
    if args.evaluate == "dev":
        figures = examine(judge, tokens)
    else:
        quick = args.evaluate == "quick"
        figures = evaluate(judge, QUICK_STACKS if quick else FULL_STACKS, quick)
    (args.out / f"evaluation_{args.seed}.json").write_text(json.dumps(figures, indent=1))
    for name, value in figures.items():
        print(name, value, flush=True)


if __name__ == "__main__":
    main()
