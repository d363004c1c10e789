"""How a job's ranks are divided into process groups, as Megatron-LM divides them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product

from fr_exporter.errors import UsageError

MAX_RANKS = 16_384


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parallel sizes of a job; its world size is tensor × context × data × pipeline.

    Experts are spread over the ranks that share data, so `expert` divides data × context.

    Raises:
        UsageError: a size is below 1, the experts do not divide, or the job has not 2 to 16,384 ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 1:
                raise UsageError(f"{each.name}-parallel size must be at least 1, not {getattr(self, each.name)}")
        if self.data * self.context % self.expert:
            raise UsageError(
                f"expert-parallel size {self.expert} does not divide data × context = {self.data * self.context}"
            )
        if not 2 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"a job has 2 to {MAX_RANKS} ranks, not {self.world_size}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline


@dataclass(frozen=True, eq=False)
class Group:
    """A process group of the job; `ranks` are global ranks in group-rank order. Equal only to itself."""

    name: str
    desc: str
    ranks: tuple[int, ...]

    @cached_property
    def ranks_text(self) -> str:
        """The members as a dump lists them, made once: every rank's dump repeats it."""
        return str(list(self.ranks))


# The groups in the order in which Megatron-LM makes them, by the axes along which their members differ. Ranks are
# numbered along tensor first, then context, data and pipeline. Expert groups cut data × context into experts and
# replicas of experts.
_AXES: tuple[tuple[str, frozenset[str]], ...] = (
    ("DATA_PARALLEL_GROUP_WITH_CP", frozenset({"context", "data"})),
    ("CONTEXT_PARALLEL_GROUP", frozenset({"context"})),
    ("MODEL_PARALLEL_GROUP", frozenset({"tensor", "pipeline"})),
    ("TENSOR_MODEL_PARALLEL_GROUP", frozenset({"tensor"})),
    ("PIPELINE_MODEL_PARALLEL_GROUP", frozenset({"pipeline"})),
    ("EMBEDDING_GROUP", frozenset({"pipeline"})),
)
_EXPERT_AXES: tuple[tuple[str, frozenset[str]], ...] = (
    ("EXPERT_MODEL_PARALLEL_GROUP", frozenset({"expert"})),
    ("EXPERT_DATA_PARALLEL_GROUP", frozenset({"replica"})),
)


@dataclass(frozen=True)
class Layout:
    """The process groups of a job."""

    sizes: Sizes

    @cached_property
    def groups(self) -> Sequence[Group]:
        """All groups, the default group of all ranks first, in the order in which every rank makes them."""
        sizes = self.sizes
        dense = {"tensor": sizes.tensor, "context": sizes.context, "data": sizes.data, "pipeline": sizes.pipeline}
        replicas = sizes.data * sizes.context // sizes.expert
        experts = {"tensor": sizes.tensor, "expert": sizes.expert, "replica": replicas, "pipeline": sizes.pipeline}
        members = [("default_pg", tuple(range(sizes.world_size)))]
        for desc, along in _AXES:
            members.extend((desc, _ends(ranks) if desc == "EMBEDDING_GROUP" else ranks) for ranks in _cut(dense, along))
        for desc, along in _EXPERT_AXES if sizes.expert > 1 else ():
            members.extend((desc, ranks) for ranks in _cut(experts, along))
        return [Group(str(number), desc, ranks) for number, (desc, ranks) in enumerate(members)]

    @cached_property
    def groups_of(self) -> Sequence[Mapping[str, Group]]:
        """Each rank's groups by description, in the order in which it makes them."""
        found: list[dict[str, Group]] = [{} for _ in range(self.sizes.world_size)]
        for group in self.groups:
            for rank in group.ranks:
                found[rank][group.desc] = group
        return found

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.sizes.world_size // self.sizes.pipeline)


def _cut(axes: Mapping[str, int], along: Iterable[str]) -> list[tuple[int, ...]]:
    """Cut the ranks into groups whose members differ along some axes only; the first axis is numbered first."""
    strides: dict[str, int] = {}
    stride = 1
    for axis, size in axes.items():
        strides[axis] = stride
        stride *= size

    def offsets(chosen: Iterable[str]) -> list[int]:
        steps = [range(0, strides[axis] * axes[axis], strides[axis]) for axis in reversed(list(chosen))]
        return [sum(parts) for parts in product(*steps)]

    within = offsets(axis for axis in axes if axis in set(along))
    return [tuple(first + offset for offset in within) for first in offsets(axis for axis in axes if axis not in along)]


def _ends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and the last: the stages that share the embedding."""
    return ranks[:1] if len(ranks) == 1 else (ranks[0], ranks[-1])
