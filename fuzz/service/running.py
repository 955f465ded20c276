"""One run of a campaign: what is gathered for it, and what its mode does with that."""

from __future__ import annotations

import argparse
import json
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fuzz import run as command
from fuzz.backends import Backend, has_gpu, take
from fuzz.boundaries import counts
from fuzz.findings import axes_of, file_of, save, stored, versions
from fuzz.gpu import none
from fuzz.loop import Loop
from fuzz.run import finished, prepared
from fuzz.screen import Screen
from fuzz.service.campaign_file import Campaign, CampaignError, Wanted
from fuzz.service.records import AGAIN
from fuzz.service.replaying import Replayer, Result
from fuzz.service.serving import Serving
from fuzz.service.store import url_of
from fuzz.service.storer import Storer
from fuzz.service.taking import About
from fuzz.spaces import Part
from fuzz.state import State, open_state
from fuzz.strategies import Space
from fuzz.targets import beside, built_in, chosen, provider_of
from kernels.target import Target
from spec.from_file import resolve

# Seconds that what has ended may take into the store when the campaign is over.
DRAIN = 20.0
# The share of its time that a run spends on what is known, and seconds between two looks at a full
# disk and at whether the campaign is to stop.
KNOWN_SHARE, LOOK = 0.25, 0.5
STOP = "stop"


@dataclass(slots=True)
class Stop:
    """Whether the campaign is to end: by a signal, or since `fuzz.campaign stop` asked for it."""

    path: Path
    looked: float = 0.0
    asked: bool = False

    def __call__(self) -> bool:
        if not self.asked and time.monotonic() > self.looked + LOOK:
            self.looked = time.monotonic()
            self.asked = self.path.exists()
        return self.asked or command.INTERRUPT.came


@dataclass(slots=True)
class Running:
    """What a run has: everything that a mode works with."""

    campaign: Campaign
    until: float
    screen: Screen
    state: State
    stop: Stop
    parts: list[Part]
    targets: dict[str, Target]
    backend: Backend
    loop: Loop
    storer: Storer
    because: str = ""  # why it ended, where that is not for the loop to say

    def replay(self, documents: Mapping[str, Mapping[str, Any]], seconds: float) -> list[Result]:
        """Replays findings with the code of every release that is a target, for so long."""
        until = min(time.monotonic() + seconds, self.until)
        replayer = Replayer(self.backend, self.loop.workers[0], self.targets)
        releases = list(dict.fromkeys(space.call.provider for space in self.loop.spaces))
        found = []
        for name, document in documents.items():
            for release in releases:
                if time.monotonic() > until or self.stop():
                    return found
                self.screen.note(f"replaying {name} on {release}")
                if (result := replayer.replay(document, release)) is not None:
                    self._record(result, document)
                    found.append(result)
        return found

    def _record(self, result: Result, document: Mapping[str, Any]) -> None:
        folder = self.campaign.findings
        if result.result == AGAIN and not file_of(folder, result.fingerprint).exists():
            self.state.patiently(lambda: save(folder, document))
        self.state.add({"replays": 1}, {"replay": result.to_json()})

    def fuzz(self) -> int:
        """Runs the loop until it ends; the exit status that `fuzz.run` has."""
        self.loop.run()
        return finished(options_of(self.campaign), self.loop, self.state, self.backend, self.screen)


def options_of(campaign: Campaign) -> argparse.Namespace:
    """The options of `fuzz.run` for what a campaign and it have in common."""
    found = command.parser().parse_args([])
    for name in ("budget", "backend", "arch", "seed", "workers", "deadline", "launches",
                 "findings"):
        setattr(found, name, getattr(campaign, name))
    return found


@contextmanager
def running(campaign: Campaign, until: float) -> Iterator[Running]:
    """Everything that a run needs, until its end; what has ended is in the store then, or said to
    be kept. Raises what `fuzz.run` does, and CampaignError."""
    screen, url = Screen(), url_of(campaign.store, campaign.findings)
    with ExitStack() as scope:
        state = scope.enter_context(closing(open_state(campaign.findings)))
        stop = Stop(state.folder / STOP)
        stop.path.unlink(missing_ok=True)
        state.waits = waiting(screen, stop, until)
        state.keep_journals()
        parts = gathered_parts(campaign, scope, screen)
        targets = _together(campaign, parts)
        options = options_of(campaign)
        backend = take(campaign.backend, targets, workers=campaign.workers, arch=campaign.arch)
        if campaign.backend == "auto":
            screen.line(f"backend: {backend.name} ({backend.device})")
        screen.note("loading the compiler")
        backend.warm_up()
        shrunk = {name for name, one in stored(campaign.findings).items() if one.get("shrunk")}
        loop = prepared(options, until, parts, backend, state, shrunk, screen)
        storer = Storer(about_of(campaign, loop, parts, state), url, state,
                        lambda text: said(screen, text), campaign.backlog)
        loop.paused, loop.interrupted = storer.paused, stop
        loop.investigator.interrupted, loop.investigator.save = stop, patient(state, save)
        command.INTERRUPT.noted = True
        storer.start()
        run = Running(campaign, until, screen, state, stop, parts, targets, backend, loop, storer)
        try:
            yield run
        finally:
            for worker in loop.workers:
                worker.stop()
            storer.finish(run.because or loop.stopped or "it could not go on", DRAIN)


def said(screen: Screen, text: str) -> None:
    """A line that stays, where one of progress may be."""
    screen.note("")
    screen.line(text)


def waiting(screen: Screen, stop: Stop, until: float) -> Callable[[OSError], bool]:
    """What a state does when its disk is full: it says so once, and waits."""
    since = [0.0]

    def waits(error: OSError) -> bool:
        if time.monotonic() > since[0] + 60:
            said(screen, f"the disk is full ({error.filename or error.strerror}): "
                         f"the campaign waits for room")
        since[0] = time.monotonic()
        time.sleep(LOOK)
        return not stop() and time.monotonic() < until

    return waits


def patient(state: State, act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: state.patiently(lambda: act(*given))


def gathered_parts(campaign: Campaign, scope: ExitStack, screen: Screen) -> list[Part]:
    """The targets of each [[target]]."""
    serving = Serving()
    gpu = campaign.backend != "cpu" and has_gpu()
    return [_part(wanted, serving.gather(scope, wanted.source, screen.note), gpu)
            for wanted in campaign.targets]


def _part(wanted: Wanted, found: dict[str, Target], gpu: bool) -> Part:
    more = {**beside(found), **built_in(found)} if gpu else {}
    names = wanted.source.targets or wanted.names
    specs = () if wanted.source.targets else wanted.specs
    return Part(source=wanted.source, targets=chosen({**found, **more}, names, specs),
                longest=wanted.longest, ranges=wanted.ranges)


def _together(campaign: Campaign, parts: list[Part]) -> dict[str, Target]:
    """The targets of all parts by name. Raises CampaignError for a name that two have."""
    found: dict[str, Target] = {}
    for i, part in enumerate(parts):
        for name in part.targets:
            if name in found:
                raise CampaignError(f"{campaign.path}: [[target]] {i + 1}: {name} is in one before")
        found |= part.targets
        _in_range(campaign, f"[[target]] {i + 1} ranges", part)
    return found


def _in_range(campaign: Campaign, where: str, part: Part) -> None:
    params = {name: param for target in part.targets.values()
              for name, param in resolve(target.spec).params.items()}
    for name, (low, high) in part.ranges.items():
        if name not in params:
            raise CampaignError(f"{campaign.path}: {where}: no mask has a parameter {name!r}; "
                                f"there are {', '.join(sorted(params)) or 'none'}")
        least, most = params[name].low, params[name].high
        if not least <= low <= high <= most:
            raise CampaignError(f"{campaign.path}: {where}: {name} is from {least} to {most}")


def about_of(campaign: Campaign, loop: Loop, parts: list[Part], state: State) -> About:
    """What the store is told of a run when it begins."""
    backend = loop.workers[0].backend
    releases = sorted({space.call.provider for space in loop.spaces})
    reachable = {tuple(axes_of(space.call, backend.name)): classes_of(space)
                 for space in loop.spaces}
    return About(
        name=campaign.name, mode=campaign.mode, file=described(campaign),
        tracked=campaign.tracked or releases, targets=list(_rows(parts)),
        reachable=list(reachable.items()), run=uuid.uuid4().hex, started=int(time.time()),
        stream=state.stream, entries=state.entries, folder=campaign.findings,
        facts={"host": platform.node(), "backend": backend.name, "device": backend.device,
               "seed": loop.settings.seed, "workers": len(loop.workers), "versions": versions()},
    )


def described(campaign: Campaign) -> dict[str, Any]:
    """What the file says, but for the store, whose URL may hold a password."""
    given = asdict(campaign)
    for name in ("store", "path"):
        del given[name]
    return json.loads(json.dumps(given, default=str))


def _rows(parts: list[Part]) -> Iterator[dict[str, Any]]:
    for part in parts:
        for target in part.targets.values():
            yield {"name": target.target, "release": provider_of(target.target),
                   "spec": target.spec, "source": asdict(part.source)}


def classes_of(space: Space) -> tuple[str, ...]:
    """The boundary classes that sequences for a space are counted in."""
    least = {name: param.low for name, param in space.mask.params.items()}
    call = replace(space.call, params={**least, **space.call.params})
    return tuple(counts(space.mask, call, none(space.mask)))
