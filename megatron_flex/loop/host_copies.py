"""Host copies of layers in a run: hand-overs through them, and recovery from them.

One manager a server keeps them (:mod:`megatron_flex.twinlayer`). The first worker of a server, its
*leader*, starts it and ends it. Every ``--flexpipe-twin-snapshot`` iterations the owners of all
slabs write a version; the number of a version is that of its iteration. An attempt that follows
another continues from the newest version of which the servers together hold every slab. A manager
that ends is replaced by a new one, which begins with nothing.

Where workers share layers, those of one place in their groups have managers, slabs and servers of
their own, as if they were a job; all go on from one version.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checkpoint.load import check_model
from megatron_flex.checkpoint.manifest import MODEL
from megatron_flex.config.config import Config
from megatron_flex.model.tensor_group import TensorGroup
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.attempt import attempt, is_first_attempt, restarts_are_left
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.shards import filling
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.world import World
from megatron_flex.schedule.slabs import slab_holders
from megatron_flex.twinlayer.copies import restore
from megatron_flex.twinlayer.errors import ManagerLost, TwinError
from megatron_flex.twinlayer.location import job_name, runtime_directory, socket_of
from megatron_flex.twinlayer.manager import AT_ONCE, Shape, entry_bytes, start, stop
from megatron_flex.twinlayer.worker import Member, TwinLayers, Version

_FAREWELL = 2.0
"""Seconds for which a manager without versions worth keeping outlasts its workers."""

_KNOWN_COMPLETE = 2
"""A worker has copied its slabs of iteration k when it has updated them in k+1, before the global
norm of k+2; a worker that has passed that norm knows it of all others."""

_REPLACEMENTS = 3
"""New managers in a run, before it goes on without host copies."""


class HostCopies:
    """One worker's part. All workers call each method together.

    Attributes:
        servers: a number for the server of each worker: its leader's rank.
        found: the newest version that the servers of an earlier attempt hold together.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        num_slabs: int,
        *,
        job: str | None = None,
        server: str | None = None,
    ) -> None:
        """Look for what an earlier attempt left.

        Args:
            num_slabs: slabs of the model; a version is complete when it has them all.
            job: name of the job; default: from the launcher's environment.
            server: where workers share memory; default: machine and directory of the sockets.
        """
        self._options = config.flexpipe
        self._world = world
        self._every = config.flexpipe.flexpipe_twin_snapshot
        self.found: Version | None = None
        self.servers = tuple(range(world.size))
        self._layers: TwinLayers | None = None
        f = config.flexpipe
        self._wanted = f.flexpipe_twin and (f.plans_change or self._every is not None)
        if not self._wanted:
            return
        names = world.alike(world.gather(_server() if server is None else server))
        self.servers = tuple(names.index(name) for name in names)
        here = self.servers[world.rank]
        self._local = tuple(r for r, s in enumerate(self.servers) if s == here)
        self._leads = world.rank == here
        if job is None:
            job = job_name(os.environ) or str(world.broadcast(f"job {secrets.token_hex(8)}"))
        self._job = _job_of_server(job, here, len(set(self.servers)), world.tensor)
        self._num_slabs = num_slabs
        self._holding: dict[int, set[int]] = {}  # server -> its slabs of the version found
        self._uncommitted: list[int] = []
        self._arena: ArenaTransport | None = None
        self._needs = Shape(0, 0, 0)
        self._replaced = 0
        self.found = self._find()

    def reserve(self, holdings: Holdings, plan: Plan) -> None:
        """Have a manager with enough memory for a run that begins with ``plan``.

        Raises :class:`TwinError` on all workers when one server cannot.
        """
        if not self._wanted:
            return
        self._needs = shape = self._shape(holdings, plan)
        if not shape.banks and not shape.room_bytes:
            return
        problem = self._start(self._layers is None)
        if problem:
            advice = "remove --flexpipe-twin-snapshot" if self._every else "give --flexpipe-no-twin"
            raise TwinError(f"{problem}: {advice}, or use more servers")
        if self._layers is None:
            self._layers = self._connect()
        if self._leads:
            self._layers.adopt(0 if self.found is None else self.found.number)

    def arena(self) -> ArenaTransport | None:
        """What carries hand-overs within a server; ``None`` without host copies."""
        layers = self._layers
        if layers is None or not layers.shape.room_bytes or not self._options.flexpipe_twin:
            return None
        self._arena = ArenaTransport(self._world.rank, self.servers, layers.hand_overs)
        return self._arena

    def restore(self, holdings: Holdings, plan: Plan) -> dict[str, Any] | None:
        """Fill the slabs from the version found; what belongs to it beside them.

        ``None`` when there is none. Raises ``CheckpointError`` when it is of another model.
        """
        if self.found is None:
            return None
        assert self.found.common is not None
        check_model(self.found.common[MODEL], asdict(holdings.config))
        holders = slab_holders(plan, holdings.config.layers)
        with filling(holdings) as slabs:
            for slab, ranks in enumerate(holders):
                for rank in ranks:
                    self._bring(holdings.state_bytes(slab), slabs, slab, rank)
            for held in slabs.values():
                held.params_from_masters()
        return self.found.common

    def start_from(self, saved: int) -> int:
        """The iteration to start from, when that of the checkpoint on the disk is ``saved``."""
        if self.found is not None and self.found.number < saved:
            self.found = None
        return saved if self.found is None else self.found.number

    @property
    def lost(self) -> bool:
        """Whether this worker found the manager ended; :meth:`after` wants to know it of all."""
        return self._layers is not None and self._layers.lost

    def after(
        self, iteration: int, executor: Executor, common: Callable[[], Any], *, lost: bool = False
    ) -> None:
        """Begin to write a version if ``iteration``, which has ended, is to have one.

        ``common()`` is what belongs to it beside the slabs. ``lost``: whether any worker has found
        its manager ended, the same on all; they have a new one then, if there can be one.
        """
        if lost and self._layers is not None:
            self._replace(executor)
        layers = self._layers
        if layers is None:
            return
        while self._uncommitted and self._uncommitted[0] + _KNOWN_COMPLETE <= iteration:
            layers.arena.commit(self._uncommitted.pop(0))
        if self._every is None or iteration % self._every:
            return
        whole = executor.collect()
        if layers.lost:
            return
        holdings = executor.holdings
        sizes = {slab: holdings.state_bytes(slab) for slab in holdings.owned}
        text = json.dumps(common()) if self._leads else None
        layers.snapshots.begin(iteration, sizes, text)
        executor.copy_states(layers.snapshots.save, whole)
        self._uncommitted.append(iteration)

    def close(self) -> None:
        """The job has ended well: nothing is kept."""
        if self._layers is None:
            return
        self._world.barrier()  # a worker that dies before the others have ended needs the versions
        self._end()

    # ---- managers ----------------------------------------------------------------------------

    def _start(self, wanted: bool) -> str:
        """Start the managers of the servers that want one; what went wrong on any of them.

        ``wanted`` is the same on all workers of a server.
        """
        problem = ""
        if wanted and self._leads:
            timeout = self._options.flexpipe_twin_timeout
            at_once = max(AT_ONCE, torch.cuda.device_count())
            try:
                start(self._socket, self._job, self._needs, timeout, at_once)
            except TwinError as error:
                problem = str(error)
        return next((p for p in self._world.gather(problem) if p), "")

    def _replace(self, executor: Executor) -> None:
        """Have new managers where they have ended; where that cannot be, go on without any."""
        executor.settle()
        self._replaced += 1
        lost = self._world.alike(self._world.gather(self.lost))
        gone = {server for server, ended in zip(self.servers, lost, strict=True) if ended}
        mine = self.servers[self._world.rank] in gone
        if mine:
            self.found = None
            self._uncommitted.clear()
            self._leave()
        self._world.barrier()  # now the old memory is free
        problem = f"{_REPLACEMENTS} others have ended before"
        if self._replaced <= _REPLACEMENTS:
            problem = self._start(mine) or self._join(mine)
        if mine and self._leads:
            what = f"without host copies: {problem}" if problem else "with a new one"
            print(f"warning: the manager of host copies of this server ({self._job}) has ended."
                  f" Training goes on {what}.", file=sys.stderr, flush=True)  # fmt: skip
        if problem:
            self._end()

    def _join(self, wanted: bool) -> str:
        """Connect to this server's new manager; what went wrong on any worker."""
        problem = ""
        if wanted:
            try:
                self._layers = self._connect()
            except TwinError as error:
                problem = str(error)
            else:
                if self._arena is not None:
                    self._arena.renew(self._layers.hand_overs)
        return next((p for p in self._world.gather(problem) if p), "")

    def _leave(self) -> None:
        """Let go of the manager and its memory."""
        if self._arena is not None:
            self._arena.renew(None)
        if self._layers is not None:
            self._layers.close()
            self._layers = None

    def _end(self) -> None:
        """End the manager, if there is one, and keep nothing any more."""
        if self._leads:
            if self._layers is not None:
                self._layers.end()
            self._socket.unlink(missing_ok=True)  # that of a manager which was killed
        self._leave()

    # ---- what an earlier attempt left --------------------------------------------------------

    @property
    def _socket(self) -> Path:
        return socket_of(self._job)

    def _find(self) -> Version | None:
        """The newest version that is complete everywhere and whose checksums hold."""
        again = self._every is not None and not is_first_attempt()
        if self._leads and not again:
            stop(self._socket)  # a leftover of another job
        versions: list[Version] = []
        if again:
            try:
                self._layers = self._connect()
                versions = self._layers.versions()
            except ManagerLost:
                self._layers = None
        # A server whose manager is gone has none for all its workers, whatever some have seen.
        everyone = self._world.alike(self._world.gather(self._layers is not None))
        if not all(everyone[rank] for rank in self._local):
            self._leave()
            versions = []
        complete = {v.number: sorted(v.entries) for v in versions if v.common is not None}
        everything = self._world.gather(complete)
        tables = self._world.alike(everything)
        for number in sorted({n for table in everything for n in table}, reverse=True):
            if not all(number in table for table in everything):
                continue
            version = next(v for v in versions if v.number == number)
            holding = {server: set(tables[server][number]) for server in set(self.servers)}
            whole = set().union(*holding.values()) == set(range(self._num_slabs))
            share = sorted(version.entries)[self._local.index(self._world.rank) :: len(self._local)]
            damaged = [slab for slab in share if not version.entries[slab].intact()]
            if not self._world.max(0 if whole and not damaged else 1):
                self._holding = holding
                return version
        return None

    def _connect(self) -> TwinLayers:
        keeps = self._every is not None and restarts_are_left()
        member = Member(
            self._world.rank,
            attempt(),
            len(self._local),
            self._options.flexpipe_twin_timeout if keeps else _FAREWELL,
            self._world.timeout.total_seconds(),
        )
        return TwinLayers(self._socket, member, self._world.device)

    def _shape(self, holdings: Holdings, plan: Plan) -> Shape:
        """What this server's arena must hold."""
        layers = holdings.config.layers
        owned = {s: entry_bytes(holdings.state_bytes(s)) for s in holdings.owned}
        sizes: dict[int, int] = {}
        for one in self._world.alike(self._world.gather(owned)):
            sizes.update(one)
        # Under changing plans the workers of one server may come to own everything.
        holders = slab_holders(plan, layers)
        local = sum(size for slab, size in sizes.items() if holders[slab][0] in self._local)
        total = sum(sizes.values())
        banks = 0 if self._every is None else 3 if self._every < _KNOWN_COMPLETE else 2
        room = 0
        if self._hands_over():
            # Of a live switch only what has no room on its device is handed over.
            live = self._options.flexpipe_switch == "live"
            room = max(total // 4, 4 * max(sizes.values())) if live else total
        return Shape(banks, total if self._options.plans_change else local, room)

    def _hands_over(self) -> bool:
        """Whether layers may be handed over between workers of one server."""
        f = self._options
        several = len(set(self.servers)) < len(self.servers)
        ways = ("live", "handover")
        return f.flexpipe_twin and f.plans_change and f.flexpipe_switch in ways and several

    def _bring(self, size: int, slabs: Mapping[int, Slab], slab: int, rank: int) -> None:
        """Fill ``slab`` on worker ``rank``, from another server if its own does not have it."""
        assert self.found is not None
        me, here = self._world.rank, self.servers[rank]
        # The rank of a server's leader is the server's number.
        source = here if slab in self._holding[here] else self._elsewhere(slab)
        if me not in (rank, source) or not size:
            return
        if source == here:
            if me == rank:
                restore(self.found.entries[slab], slabs[slab].state)
            return
        assert self._world.state is not None
        device = self._world.device
        if me == rank:
            state = slabs[slab].state
            received = state if state.device == device else torch.empty_like(state, device=device)
            self._world.state.receive(received, source).wait(self._world.timeout)
            if received is not state:
                state.copy_(received)
        else:
            data = self.found.entries[slab].data.view(torch.float32)
            self._world.state.send(data.to(device), rank).wait(self._world.timeout)

    def _elsewhere(self, slab: int) -> int:
        return min(server for server, slabs in self._holding.items() if slab in slabs)


def forget_host_copies(config: Config, world: World) -> None:
    """End the managers that an earlier attempt left, which had nothing to do any more."""
    if not config.flexpipe.flexpipe_twin or is_first_attempt():
        return
    names = world.alike(world.gather(_server()))
    here = names.index(names[world.rank])
    job = job_name(os.environ)
    if here == world.rank and job is not None:
        stop(socket_of(_job_of_server(job, here, len(set(names)), world.tensor)))


def _job_of_server(job: str, server: int, servers: int, group: TensorGroup) -> str:
    place = f", place {group.index} of {group.size}" if group.size > 1 else ""
    return (job if servers == 1 else f"{job}, server {server}") + place


def _server() -> str:
    """The same for all workers that can share memory through one manager, and for no others."""
    directory = runtime_directory().stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {directory.st_dev} {directory.st_ino}"
