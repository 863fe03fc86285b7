"""What every run asks itself at the end. A run that cannot answer has failed, whatever its curve looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from millpond.train.exploring import Explored
from millpond.train.stored import Stored

_RARE = 1e-9  # a check that judges by chance fails a good run less often than this


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: whether it holds, and the numbers it was decided by."""

    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many samples the settings allow: at most ``samples_per_insert`` for each item after ``learning_starts``, and
    when all is learned at least so many but less than a batch. Where a resumed run had others, the ``most_…`` and
    ``least_…`` are the widest of them; ``lost`` is how many samples its ends may have drawn and not learned from.
    """

    samples_per_insert: float
    learning_starts: int
    most_samples_per_insert: float
    least_learning_starts: int
    lost: int = 0

    def most(self, items: int) -> Fraction:
        return Fraction(self.most_samples_per_insert) * max(0, items - self.least_learning_starts)

    def least(self, items: int, batch_size: int) -> Fraction:
        """What is learned from, at the end, is more than this."""
        allowed = Fraction(self.samples_per_insert) * max(0, items - self.learning_starts)
        return allowed - batch_size - self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known when a run ends. Frames are transitions, of which an item of replay may have several; versions and
    steps count optimizer steps.

    ``newest_version`` is the highest policy version seen in replay, ``learnable_frames`` how many frames must carry a
    newer version than 0 if all is well. ``learned`` counts the items of all batches that were learned from.
    ``payload_bytes_through_ray`` is None where no part of the run is on Ray, or where the settings want them there:
    ``payload_by_ray``.
    """

    total_frames: int
    collected_frames: int
    written_frames: int
    optimizer_steps: int
    published_version: int
    newest_version: int
    learnable_frames: int
    batch_size: int
    explored: Explored = field(default_factory=Explored)
    complete: bool = True
    batch_shapes_seen: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    learned: int = 0
    written_items: int = 0
    ratio: Ratio | None = None
    stored: Stored = field(default_factory=Stored)
    payload_bytes_through_ray: int | None = None
    payload_by_ray: bool = False
    not_finite: Mapping[str, int] = field(default_factory=dict)


def run_checks(facts: Facts) -> dict[str, Check]:
    """All checks by name. A run that was stopped on request need not have reached its target."""
    checks = {
        "optimizer_ran": Check(facts.optimizer_steps > 0, f"{facts.optimizer_steps} optimizer steps"),
        "frames_collected": Check(
            facts.collected_frames == facts.total_frames,
            f"{facts.collected_frames} collected of total_frames={facts.total_frames}",
        ),
        "frames_written": Check(
            facts.written_frames == facts.collected_frames,
            f"{facts.written_frames} written to replay, {facts.collected_frames} collected",
        ),
        "metrics_finite": _metrics_finite(facts),
        "weights_published": Check(
            facts.published_version == facts.optimizer_steps,
            f"published version {facts.published_version}, {facts.optimizer_steps} optimizer steps",
        ),
        "policy_reached_replay": _policy_reached_replay(facts),
        "batch_shape": _batch_shape(facts),
        "policy_explores": _policy_explores(facts),
        "update_ratio": _update_ratio(facts),
        "frames_distinct": Check(
            facts.stored.distinct == facts.stored.frames,
            f"{facts.stored.distinct} different ones among the {facts.stored.frames} newest frames in replay",
        ),
        "field_shapes": Check(
            not facts.stored.unfit,
            "; ".join(facts.stored.unfit) or "the fields in replay are as the environment's spaces say",
        ),
        "payload_beside_ray": _payload_beside_ray(facts.payload_bytes_through_ray, facts.payload_by_ray),
    }
    if not facts.complete:
        for name in ("frames_collected", "optimizer_ran", "policy_reached_replay", "policy_explores"):
            checks[name] = Check(True, f"stopped on request: {checks[name].detail}")
    return checks


def failed(checks: Mapping[str, Check]) -> list[str]:
    """``name: detail`` of each check that does not hold."""
    return [f"{name}: {check.detail}" for name, check in checks.items() if not check.ok]


def _metrics_finite(facts: Facts) -> Check:
    if not facts.not_finite:
        return Check(True, "losses, values and counters are finite")
    found = ", ".join(f"{name} (first at frame {frame})" for name, frame in sorted(facts.not_finite.items()))
    return Check(False, f"not finite: {found}")


def _policy_reached_replay(facts: Facts) -> Check:
    if facts.newest_version > 0:
        return Check(True, f"newest policy version in replay: {facts.newest_version}")
    if facts.learnable_frames <= 0:
        return Check(True, "no frame of a policy was left to collect when the first updated one was published")
    return Check(False, f"replay holds only frames of the first policy, after {facts.optimizer_steps} optimizer steps")


def _batch_shape(facts: Facts) -> Check:
    right = (facts.batch_size,)
    if wrong := sorted(set(facts.batch_shapes_seen) - {right}):
        found = ", ".join(str(list(shape)) for shape in wrong)
        return Check(False, f"batches should have the shape [{facts.batch_size}], but there were such of {found}")
    return Check(True, f"{facts.batch_shapes_seen.get(right, 0)} sampled batches of the shape [{facts.batch_size}]")


def _update_ratio(facts: Facts) -> Check:
    """Of the updates themselves, not of what replay counts."""
    if facts.ratio is None:
        return Check(True, f"{facts.learned} samples learned from")
    items, most = facts.written_items, facts.ratio.most(facts.written_items)
    least = facts.ratio.least(items, facts.batch_size) if facts.complete else Fraction(-1)
    detail = (
        f"{facts.learned} samples learned from, for {items} items in replay of which the first"
        f" {facts.ratio.learning_starts} owe none; {facts.ratio.samples_per_insert:g} for each allow {float(most):.12g}"
    )
    if facts.learned > most:
        return Check(False, f"too many updates: {detail}")
    if facts.learned <= least:
        return Check(False, f"too few updates: {detail}, and ask for more than {float(least):.12g}")
    return Check(True, detail)


def _payload_beside_ray(nbytes: int | None, wanted: bool) -> Check:
    if wanted:
        return Check(True, "replay.transport=ray: the settings want transitions in Ray's object store")
    if nbytes is None:
        return Check(True, "no part of this run is on Ray")
    return Check(nbytes == 0, f"{nbytes} bytes of transitions went through Ray's object store")


def clean_shutdown(left: Sequence[str] | None) -> Check:
    """``left``: what is there after all parts were closed; None: other runs in this process make that unknowable."""
    if left is None:
        return Check(True, "not judged: another run went on in the same process")
    if left:
        return Check(False, f"left behind: {'; '.join(left)}")
    return Check(True, "no process and no shared memory is left")


def _policy_explores(facts: Facts) -> Check:
    """Random actions, made without a policy, are not judged; nor is a run whose settings ask for too few to judge."""
    explored = facts.explored
    detail = (
        f"of {explored.rows} actions in replay {explored.differing} differ from the deterministic ones of the policy"
        f" versions that made them; {explored.expected:.3g} were to be expected"
    )
    if explored.chance < _RARE:
        return Check(False, f"the collectors do not explore as they should: {detail}")
    return Check(True, detail)
