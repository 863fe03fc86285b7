"""``millpond eval RUN``: how good a trained policy is."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from millpond.core.errors import InvalidArgument
from millpond.train.compose import settings_from_file
from millpond.train.evaluation import play
from millpond.train.filming import allow_headless_rendering, check_filming, film
from millpond.train.policy import load_policy
from millpond.train.run_state import RunDirectory


def main(words: Sequence[str]) -> int:
    """Run ``millpond eval WORDS``."""
    parser = argparse.ArgumentParser(
        prog="millpond eval",
        description="Plays episodes with the policy of a run, without exploration, and prints their returns.",
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--episodes", type=int, help="how many (default: the run's eval.episodes)")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes (default: 0)")
    parser.add_argument(
        "--checkpoint", type=Path, help="one of the run's checkpoints, by name or path (default: the newest)"
    )
    parser.add_argument("--video", type=Path, help="write a film of one environment to this MP4 file too")
    asked = parser.parse_args(words)
    if asked.episodes is not None and asked.episodes < 1:
        raise InvalidArgument(f"--episodes must be at least 1, got {asked.episodes}")
    allow_headless_rendering()
    policy = load_policy(asked.run, checkpoint=asked.checkpoint)
    settings = settings_from_file(RunDirectory.open(asked.run).config)
    if asked.video is not None:
        check_filming(settings.env, asked.video)
    played = play(
        policy,
        settings.env,
        episodes=asked.episodes or settings.eval.episodes,
        max_steps=settings.eval.max_steps,
        seed=asked.seed,
    )
    for number, (total, length) in enumerate(zip(played.returns, played.lengths, strict=True)):
        print(f"episode {number:3d}   return {total:10.2f}   steps {length:5d}")
    whole = [total for total in played.returns if math.isfinite(total)]
    if len(whole) < len(played.returns):
        print(f"{len(played.returns) - len(whole)} episodes had numbers that are not finite, and count in no mean")
    if whole:
        print(f"mean return {statistics.fmean(whole):.2f} ± {statistics.pstdev(whole):.2f} over {len(whole)} episodes")
    if asked.video is not None:
        film(policy, settings.env, asked.video, steps=settings.eval.video_steps, seed=asked.seed)
        print(f"video {asked.video}")
    return 0
