"""What the host of each rank does, in order: Megatron-LM's training step with one-forward-one-backward pipelining.

A step reads a batch, pushes micro-batches through the layers of the stage, reduces gradients while the last backward
pass still runs, and ends in reductions over the whole job whose result the host waits for. So hosts run ahead of
their devices within a step, never across it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from fr_exporter.errors import UsageError
from fr_exporter.simulate.layout import Group, Layout

Shape = tuple[int, ...]
Verb = Literal["send", "recv"]

_MS = 1_000_000
_FORWARD_NS, _BACKWARD_NS, _OPTIMIZER_NS = 20 * _MS, 40 * _MS, 30 * _MS
_HIDDEN, _SEQUENCE, _BUCKET = 5120, 4096, 104_857_600


class Transfer(NamedTuple):
    """One send or recv; `peer` is a group rank."""

    verb: Verb
    peer: int


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, or with `transfers` a send, a recv, or a batch of them.

    A `blocking` call holds up the device's later computation, never the host. `root` is the global rank of a rooted
    collective's root. `site` names the place in the code. A `broken` call never ends on any rank; one that
    `ends_here_only` ends on the rank that issued it so.
    """

    group: Group
    operation: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    site: str
    blocking: bool = True
    transfers: tuple[Transfer, ...] = ()
    batched: bool = False
    root: int | None = None
    broken: bool = False
    ends_here_only: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of the device on its own, nanoseconds."""

    duration_ns: int


@dataclass(frozen=True, slots=True)
class Join:
    """Hold up the device's later computation until every call issued to a group is done."""

    group: Group


@dataclass(frozen=True, slots=True)
class Sync:
    """Hold up the host until the device has done what was issued: an `.item()`."""


@dataclass(frozen=True, slots=True)
class HostStalls:
    """The host issues nothing more: a lock, a data loader, an exception that was swallowed."""


@dataclass(frozen=True, slots=True)
class DeviceStalls:
    """The device starts nothing more; the host goes on until it waits for it."""


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """The device serves its peers, and nothing of it is seen to complete any more."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The process dies: its host and device do nothing more, and it leaves no dump."""


Item = Call | Compute | Join | Sync | HostStalls | DeviceStalls | DeviceLost | Killed


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and in which manner a job trains.

    `microbatches` None takes two more than there are stages. `batched` sends and receives go as one batch, as
    `batch_isend_irecv` makes them; `p2p_sync` lets the host wait for each of them.

    Raises:
        UsageError: there are fewer than two steps, or less than one layer or micro-batch.
    """

    steps: int = 4
    layers: int = 2
    microbatches: int | None = None
    batched: bool = True
    p2p_sync: bool = True

    def __post_init__(self) -> None:
        # A fault strikes in the step before the last, so that all that it stops is there to see.
        for name, least in (("steps", 2), ("layers", 1), ("microbatches", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True, slots=True)
class Program:
    """The items of one rank, and where each step begins."""

    items: tuple[Item, ...]
    steps: tuple[int, ...]


def write_program(layout: Layout, rank: int, schedule: Schedule, random: Random) -> Program:
    """Return what a rank does when nothing goes wrong; `random` makes its computations differ by a few percent."""
    step = list(_Author(layout, rank, schedule).step())
    items = [_vary(item, random) if isinstance(item, Compute) else item for _ in range(schedule.steps) for item in step]
    return Program(tuple(items), tuple(range(0, len(items), len(step))))


def _vary(compute: Compute, random: Random) -> Compute:
    return Compute(int(compute.duration_ns * random.uniform(0.97, 1.03)))


class _Author:
    """Writes one rank's step. Its calls are made once for each kind: a step repeats them many times."""

    def __init__(self, layout: Layout, rank: int, schedule: Schedule) -> None:
        sizes = layout.sizes
        # A group of one rank is made, and never used.
        groups = {desc: group for desc, group in layout.groups_of[rank].items() if len(group.ranks) > 1}
        self._rank = rank
        self._groups: Mapping[str, Group] = groups
        self._schedule = schedule
        self._stage, self._stages = layout.stage_of(rank), sizes.pipeline
        self._microbatches = sizes.pipeline + 2 if schedule.microbatches is None else schedule.microbatches
        self._tensor = groups.get("TENSOR_MODEL_PARALLEL_GROUP")
        self._context = groups.get("CONTEXT_PARALLEL_GROUP")
        self._data = groups.get("DATA_PARALLEL_GROUP_WITH_CP")
        self._expert = groups.get("EXPERT_MODEL_PARALLEL_GROUP")
        self._pipeline = groups.get("PIPELINE_MODEL_PARALLEL_GROUP")
        self._activation: Shape = (_SEQUENCE // sizes.context, 1, _HIDDEN)

    def step(self) -> Iterator[Item]:
        """Yield one training step."""
        yield from self._read_batch()
        if self._data is not None:
            yield Join(self._data)
        yield from self._pipeline_schedule()
        yield from self._finish()

    def _read_batch(self) -> Iterator[Item]:
        if self._tensor is not None and self._stage in (0, self._stages - 1):
            root = self._tensor.ranks[0]
            for size in (5, _SEQUENCE):
                yield Call(self._tensor, "broadcast", ((size,),), ((size,),), "Long", "batch", root=root)

    def _pipeline_schedule(self) -> Iterator[Item]:
        """Yield one-forward-one-backward: fill the pipeline, alternate, drain it."""
        forward = self._layers(_FORWARD_NS)
        backward, last_backward = self._layers(_BACKWARD_NS), self._layers(_BACKWARD_NS, self._reduce_gradients())
        from_previous, from_next = self._exchange(recv_from=-1), self._exchange(recv_from=1)
        to_previous, to_next = self._exchange(send_to=-1), self._exchange(send_to=1)
        with_previous, with_next = self._exchange(-1, -1), self._exchange(1, 1)
        warmup = min(self._stages - self._stage - 1, self._microbatches)
        steady = self._microbatches - warmup
        for _ in range(warmup):
            yield from (*from_previous, *forward, *to_next)
        if steady:
            yield from from_previous
        for index in range(steady):
            is_last = index == steady - 1
            yield from (*forward, *with_next, *(last_backward if is_last and not warmup else backward))
            yield from to_previous if is_last else with_previous
        for index in range(warmup):
            yield from (*from_next, *(last_backward if index == warmup - 1 else backward), *to_previous)

    def _exchange(self, send_to: int | None = None, recv_from: int | None = None) -> list[Item]:
        """Return a send and a recv to the stages before (-1) or after (1), where there are such."""
        steps: tuple[tuple[Verb, int | None], ...] = (("send", send_to), ("recv", recv_from))
        wanted = [Transfer(verb, self._stage + step) for verb, step in steps if step is not None]
        transfers = tuple(transfer for transfer in wanted if 0 <= transfer.peer < self._stages)
        if self._pipeline is None or not transfers:
            return []
        sync = [Sync()] if self._schedule.p2p_sync else []
        if self._schedule.batched:
            return [self._transfer(self._pipeline, transfers, "pipeline", batched=True), *sync]
        # Both stages of a pair must order their calls alike.
        ordered = transfers if self._stage % 2 == 0 else transfers[::-1]
        calls = [self._transfer(self._pipeline, (transfer,), "pipeline", batched=False) for transfer in ordered]
        return [*calls, Join(self._pipeline), *sync]

    def _transfer(self, group: Group, transfers: tuple[Transfer, ...], site: str, *, batched: bool) -> Call:
        shapes = (self._activation,)
        return Call(
            group, "coalesced", shapes, shapes, "BFloat16", site, blocking=batched, transfers=transfers, batched=batched
        )

    def _layers(self, duration_ns: int, then: Iterable[Item] = ()) -> list[Item]:
        return [*self._layer(duration_ns), *then] * self._schedule.layers

    def _layer(self, duration_ns: int) -> Iterator[Item]:
        yield Compute(duration_ns)
        yield from self._ring_attention()
        if self._expert is None:
            if self._tensor is not None:
                yield self._collective(self._tensor, "all_reduce", self._activation, "attention")
            yield Compute(duration_ns)
            if self._tensor is not None:
                yield self._collective(self._tensor, "all_reduce", self._activation, "mlp")
        else:
            yield from self._mixture_of_experts(self._expert, duration_ns)

    def _ring_attention(self) -> Iterator[Item]:
        """Pass keys and values around the ring of context-parallel ranks."""
        if self._context is None:
            return
        size = len(self._context.ranks)
        own = self._context.ranks.index(self._rank)
        transfers = (Transfer("send", (own + 1) % size), Transfer("recv", (own - 1) % size))
        for _ in range(size - 1):
            yield self._transfer(self._context, transfers, "ring", batched=True)

    def _mixture_of_experts(self, expert: Group, duration_ns: int) -> Iterator[Item]:
        """Yield sequence-parallel attention, then experts; the host needs the token counts to size the exchange."""
        if self._tensor is not None:
            shard = self._activation
            whole = (shard[0] * len(self._tensor.ranks), *shard[1:])
            yield Call(self._tensor, "_all_gather_base", (shard,), (whole,), "BFloat16", "attention")
            yield Call(self._tensor, "_reduce_scatter_base", (whole,), (shard,), "BFloat16", "attention")
        yield Call(expert, "_all_gather_base", ((8,),), ((8 * len(expert.ranks),),), "Long", "router")
        yield Sync()
        tokens = (_SEQUENCE - 37 * self._rank % 91, _HIDDEN)
        yield Call(expert, "all_to_all", (self._activation,), (tokens,), "BFloat16", "dispatch")
        yield Compute(duration_ns)
        yield Call(expert, "all_to_all", (tokens,), (self._activation,), "BFloat16", "combine")

    def _reduce_gradients(self) -> Iterator[Item]:
        """Reduce what is ready while the backward pass goes on."""
        for desc in ("DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"):
            if desc in self._groups:
                whole, shard = _buckets(self._groups[desc])
                operation = "reduce_scatter_tensor_coalesced"
                yield Call(self._groups[desc], operation, whole, shard, "Float", "gradients", blocking=False)

    def _gather_parameters(self) -> Iterator[Item]:
        """Gather the updated parameters while the next step begins."""
        if self._data is not None:
            whole, shard = _buckets(self._data)
            operation = "all_gather_into_tensor_coalesced"
            yield Call(self._data, operation, shard, whole, "BFloat16", "parameters", blocking=False)

    def _finish(self) -> Iterator[Item]:
        for desc in ("DATA_PARALLEL_GROUP_WITH_CP", "EXPERT_DATA_PARALLEL_GROUP"):
            if desc in self._groups:
                yield Join(self._groups[desc])
        for desc, site in (
            ("EMBEDDING_GROUP", "embedding"),
            ("MODEL_PARALLEL_GROUP", "found_inf"),
            ("default_pg", "grad_norm"),
        ):
            if desc in self._groups:
                shape = (32_000, _HIDDEN) if desc == "EMBEDDING_GROUP" else (1,)
                yield self._collective(self._groups[desc], "all_reduce", shape, site, dtype="Float")
        yield Sync()
        yield Compute(_OPTIMIZER_NS)
        yield from self._gather_parameters()

    def _collective(self, group: Group, operation: str, shape: Shape, site: str, dtype: str = "BFloat16") -> Call:
        return Call(group, operation, (shape,), (shape,), dtype, site)


def _buckets(group: Group) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Return the shapes of two gradient buckets, which go as one call, and of each rank's shards of them."""
    return ((_BUCKET,),) * 2, ((_BUCKET // len(group.ranks),),) * 2


# Where in the training code each call is issued: function, file, line.
_LOOP = (
    ("forward_backward_pipelining", "/opt/megatron/core/pipeline_parallel/schedules.py", 1884),
    ("train_step", "/opt/megatron/training/training.py", 1212),
    ("train", "/opt/megatron/training/training.py", 2078),
)
SITES: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "batch": (("get_batch_on_this_tp_rank", "/opt/megatron/training/utils.py", 301), *_LOOP),
    "attention": (("forward", "/opt/megatron/core/transformer/attention.py", 742), *_LOOP),
    "mlp": (("forward", "/opt/megatron/core/transformer/mlp.py", 151), *_LOOP),
    "ring": (("attn_forward_func_with_cp", "/opt/transformer_engine/attention.py", 2301), *_LOOP),
    "router": (("preprocess", "/opt/megatron/core/transformer/moe/token_dispatcher.py", 476), *_LOOP),
    "dispatch": (("token_dispatch", "/opt/megatron/core/transformer/moe/token_dispatcher.py", 640), *_LOOP),
    "combine": (("token_combine", "/opt/megatron/core/transformer/moe/token_dispatcher.py", 702), *_LOOP),
    "pipeline": (("_communicate", "/opt/megatron/core/pipeline_parallel/p2p_communication.py", 364), *_LOOP),
    "gradients": (("start_grad_sync", "/opt/megatron/core/distributed/param_and_grad_buffer.py", 343), *_LOOP),
    "parameters": (("start_param_sync", "/opt/megatron/core/distributed/param_and_grad_buffer.py", 251), *_LOOP[1:]),
    "embedding": (("_allreduce_word_embedding_grads", "/opt/megatron/core/distributed/finalize.py", 136), *_LOOP[1:]),
    "found_inf": (("found_inf_across_model", "/opt/megatron/core/optimizer/optimizer.py", 448), *_LOOP[1:]),
    "grad_norm": (("get_grad_norm_fp32", "/opt/megatron/core/optimizer/clip_grads.py", 122), *_LOOP[1:]),
}
