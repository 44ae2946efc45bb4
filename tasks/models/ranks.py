"""The ranks of one learner: how they find one another, add up, and see split weights whole."""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

LOOPBACK = ("127.0.0.1", "::1", "localhost")
RENDEZVOUS = timedelta(seconds=120)
"""How long ranks wait for one another at the start."""


@dataclass(frozen=True)
class RankGroup:
    """One rank's place among `world_size`; rank 0 listens at `address:port` for the others."""

    rank: int
    world_size: int
    address: str
    port: int


def join(group: RankGroup | None) -> None:
    """Join the process group that `group` describes, or form one alone.

    Alone needs no rendezvous, and no port that a child could inherit. In a group, rank 0 listens at
    the group's own address: left to itself, torch would listen on every interface. What gloo opens
    stays on loopback where the ranks do.
    """
    import deepspeed

    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if group is None or group.world_size == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            if group.address in LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group(
                backend, store=_store(group), rank=group.rank, world_size=group.world_size
            )
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks for it; an actor sees its GPU alone
    if not torch.cuda.is_available():
        # DeepSpeed would compile its shared-memory kernels: half a minute the first time, and a
        # lock file in its cache if that is killed. Gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _store(group: RankGroup) -> torch.distributed.TCPStore:
    listener = None
    if group.rank == 0:
        family = socket.AF_INET6 if ":" in group.address else socket.AF_INET
        with socket.create_server((group.address, group.port), family=family) as server:
            listener = os.dup(server.fileno())  # the store closes what it is given
    return torch.distributed.TCPStore(
        group.address,
        group.port,
        group.world_size,
        is_master=group.rank == 0,
        timeout=RENDEZVOUS,
        master_listen_fd=listener,
    )


def rank() -> int:
    """This process's rank; 0 alone."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Ranks that step together; 1 alone."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def gather(values: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor of this shape and type, in order of rank."""
    if world_size() == 1:
        return [values]
    own = _carried(values)
    everyone = [torch.empty_like(own) for _ in range(world_size())]
    torch.distributed.all_gather(everyone, own)
    return [theirs.to(values.device) for theirs in everyone]


def add_up(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of one shape."""
    if world_size() == 1:
        return values
    total = _carried(values).clone()
    torch.distributed.all_reduce(total)
    return total.to(values.device)


def _carried(values: torch.Tensor) -> torch.Tensor:
    """Where the ranks' backend can send it: NCCL knows GPUs only."""
    on_gpu = torch.distributed.get_backend() == "nccl"
    return (values.cuda() if on_gpu else values).contiguous()


def add_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its sum over ranks, in one message a type."""
    if world_size() == 1:
        return
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for parts in gradients.values():
        flat = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(flat)
        sizes = [part.numel() for part in parts]
        for part, total in zip(parts, flat.split(sizes), strict=True):
            part.copy_(total.view_as(part))


@contextmanager
def whole(parameters: Iterable[torch.nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Have parameters whole on every rank that ZeRO 3 has split; what is written stays if `write`.

    Every rank must enter, and with `write` write the same.
    """
    split = [p for p in parameters if hasattr(p, "ds_id")]
    if not split:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(split, modifier_rank=0 if write else None):
        yield
