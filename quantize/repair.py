"""Which tensors of a rejected quantisation to raise to a larger type, and how far. Pure rules.

Two facts make the search cheap. Near the float model the mean KL is quadratic in the error of the
weights, and errors of different tensors are unrelated, so what single tensors cost adds up: it is
measured once for each. And the error of one tensor in each type can be computed from its bytes. The
raises are then ordered by the KL they are expected to remove for each byte; the shortest run of
them that passes is found by halving; what turns out not to be needed is taken back. Only the
expectation is modelled: whether a mix passes is measured, by the gates of any other file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quantize.errors import RepairError

Mix = Mapping[str, str]
"""Tensor → the type it is raised to; tensors not named stay as the recipe has them."""


@dataclass(frozen=True)
class Rung:
    """One type that a group of tensors can have."""

    types: tuple[str, ...]
    """Of each tensor, in the group's order."""
    size_bytes: int
    """Of all its tensors."""
    left: float
    """Share of the group's error that is left, 1 as it was quantised and 0 as float."""


@dataclass(frozen=True)
class Group:
    """Tensors that are raised together."""

    tensors: tuple[str, ...]
    harm: float
    """KL that quantising these tensors costs, nats: measured by giving them back as floats."""
    rungs: tuple[Rung, ...]
    """The first is as quantised; sizes rise."""


@dataclass(frozen=True)
class Raise:
    """One step up of one group."""

    group: int
    rung: int
    added_bytes: int
    gain: float
    """KL it is expected to remove, nats."""


class Judge(Protocol):
    """Measures a mix against the gates."""

    def problem(self, mix: Mix) -> str | None:
        """Why the mix is rejected, or None where it ships."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a repair may spend. A file must stay below `ceiling_bytes`."""

    ceiling_bytes: int
    max_tensors: int
    out_of_time: Callable[[], bool]


@dataclass(frozen=True)
class Repair:
    """What a search came to."""

    mix: dict[str, str] | None
    """None where nothing within the limits passed."""
    why: str
    tried: int
    """How many mixes were measured."""


def raise_order(groups: Sequence[Group]) -> list[Raise]:
    """Every useful raise, most expected KL removed per byte first.

    Within a group only rungs on the upper hull of (bytes, gain) are used: there each further step
    brings less for each byte, so that the whole order is one list, and a group's steps come in it
    from small to large.
    """
    order = [step for index, group in enumerate(groups) for step in _hull(index, group)]
    return sorted(order, key=lambda r: (-r.gain / r.added_bytes, r.group, r.rung))


def _hull(index: int, group: Group) -> list[Raise]:
    steps: list[Raise] = []
    at = 0
    while True:
        here = group.rungs[at]
        further = [
            Raise(index, i, r.size_bytes - here.size_bytes, group.harm * (here.left - r.left))
            for i, r in enumerate(group.rungs)
            if r.size_bytes > here.size_bytes
        ]
        useful = [step for step in further if step.gain > 0]
        if not useful:
            return steps
        best = max(useful, key=lambda s: (s.gain / s.added_bytes, -s.added_bytes))
        steps.append(best)
        at = best.rung


def mix_of(groups: Sequence[Group], raises: Sequence[Raise]) -> dict[str, str]:
    """Types after these raises; of several of one group the largest counts."""
    top: dict[int, int] = {}
    for step in raises:
        top[step.group] = max(top.get(step.group, 0), step.rung)
    return {
        tensor: kind
        for index, rung in sorted(top.items())
        for tensor, kind, before in zip(
            groups[index].tensors,
            groups[index].rungs[rung].types,
            groups[index].rungs[0].types,
            strict=True,
        )
        if kind != before
    }


def affordable(
    groups: Sequence[Group], order: Sequence[Raise], size_bytes: int, limits: Limits
) -> list[Raise]:
    """The raises that fit within the limits together, in order; one too large is passed over."""
    kept: list[Raise] = []
    blocked: set[int] = set()
    total = size_bytes
    for step in order:
        fits = total + step.added_bytes < limits.ceiling_bytes
        count = len(mix_of(groups, [*kept, step]))
        if step.group in blocked or not fits or count > limits.max_tensors:
            blocked.add(step.group)  # its later steps start from this one
            continue
        kept.append(step)
        total += step.added_bytes
    return kept


def runs_within(
    groups: Sequence[Group], size_bytes: int, targets: Sequence[int]
) -> list[dict[str, str]]:
    """For each target size the mix of the longest run of raises that fits it; each mix once."""
    found: list[dict[str, str]] = []
    order = raise_order(groups)
    for target in targets:
        everything = Limits(target + 1, sum(len(g.tensors) for g in groups), lambda: False)
        mix = mix_of(groups, affordable(groups, order, size_bytes, everything))
        if mix and mix not in found:
            found.append(mix)
    return found


def search(
    groups: Sequence[Group], size_bytes: int, ceiling_name: str, judge: Judge, limits: Limits
) -> Repair:
    """The cheapest mix that passes: the shortest run of raises, then without those not needed.

    `size_bytes` is the file's size as quantised.
    """
    steps = affordable(groups, raise_order(groups), size_bytes, limits)
    run = _Run(groups, judge, limits)
    bound = (
        f"below the size of {ceiling_name} ({limits.ceiling_bytes:,} bytes) with at most "
        f"{limits.max_tensors} tensors raised"
    )
    if not steps:
        return Repair(None, f"no tensor can be raised {bound}", 0)
    length = _shortest(steps, run)
    if length is None:
        if run.stopped:
            why = f"the time limit came before a mix passed ({run.tried} measured)"
        else:
            why = f"nothing {bound} passes; the largest mix tried: {run.last_problem}"
        return Repair(None, why, run.tried)
    kept = _pruned(list(steps[:length]), run)
    mix = mix_of(groups, kept)
    tail = ", stopped by the time limit before it was as small as can be" if run.stopped else ""
    plural = "" if len(mix) == 1 else "s"
    return Repair(mix, f"{len(mix)} tensor{plural} raised{tail}", run.tried)


class _Run:
    """Measures mixes, remembers verdicts, and stops when time is up."""

    def __init__(self, groups: Sequence[Group], judge: Judge, limits: Limits) -> None:
        self._groups, self._judge, self._limits = groups, judge, limits
        self._verdicts: dict[frozenset[tuple[str, str]], str | None] = {}
        self.stopped = False
        self.last_problem = ""

    @property
    def tried(self) -> int:
        """Mixes measured so far."""
        return len(self._verdicts)

    def passes(self, raises: Sequence[Raise]) -> bool:
        """Whether the mix ships; False without measuring once time is up."""
        mix = mix_of(self._groups, raises)
        key = frozenset(mix.items())
        if key not in self._verdicts:
            if self._limits.out_of_time():
                self.stopped = True
                return False
            self._verdicts[key] = self._judge.problem(mix)
        problem = self._verdicts[key]
        self.last_problem = problem or self.last_problem
        return problem is None


def _shortest(steps: Sequence[Raise], run: _Run) -> int | None:
    """Length of the shortest run of steps that passes, by doubling and then halving.

    More raises are taken not to make a file worse; where noise says otherwise, the run found
    passes all the same, and is merely not the shortest.
    """
    failed, length = 0, 1
    while not run.passes(steps[:length]):
        if run.stopped or length == len(steps):
            return None
        failed, length = length, min(2 * length, len(steps))
    while length - failed > 1:
        middle = (failed + length) // 2
        if run.passes(steps[:middle]):
            length = middle
        else:
            failed = middle
    return length


def _pruned(kept: list[Raise], run: _Run) -> list[Raise]:
    """Take back each raise that the rest passes without, the most bytes first."""
    for step in sorted(kept, key=lambda r: (-r.added_bytes, r.group, -r.rung)):
        if any(other.group == step.group and other.rung > step.rung for other in kept):
            continue  # a higher step of the same group stands on it
        without = [other for other in kept if other is not step]
        if without and run.passes(without):
            kept = without
    return kept


def neighbours(names: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Tensors in at most `most` groups: those of one kind in neighbouring blocks go together.

    Raises:
        RepairError: `most` is less than the number of kinds.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name), []).append(name)
    if most < len(kinds):
        raise RepairError(f"groups={most}; expected at least {len(kinds)}, one group for each kind")
    width = 1
    while sum(-(-len(members) // width) for members in kinds.values()) > most:
        width += 1
    return [
        tuple(ordered[i : i + width])
        for _, members in sorted(kinds.items())
        for ordered in [sorted(members, key=_block)]
        for i in range(0, len(ordered), width)
    ]


def _kind(name: str) -> str:
    """`ffn_down.weight` of `blk.3.ffn_down.weight`."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _block(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1
