"""What every run asks itself at the end. A run that cannot answer has failed, whatever its curve looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond.train.exploring import Explored

_RARE = 1e-9  # a check that judges by chance fails a good run less often than this


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: whether it holds, and the numbers it was decided by."""

    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known when a run ends. Frames are transitions; versions and steps count optimizer steps.

    ``newest_version`` is the highest policy version seen in replay, ``learnable_frames`` how many frames must carry a
    newer version than 0 if all is well.
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
    batch_sizes_seen: Mapping[int, int] = field(default_factory=dict)
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
    wrong = {size: count for size, count in facts.batch_sizes_seen.items() if size != facts.batch_size}
    if wrong:
        return Check(False, f"replay.batch_size={facts.batch_size}, but there were batches of {sorted(wrong)} items")
    count = facts.batch_sizes_seen.get(facts.batch_size, 0)
    return Check(True, f"{count} sampled batches of {facts.batch_size} items")


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
